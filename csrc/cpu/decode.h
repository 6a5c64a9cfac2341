// Codes in 32-bit words to float32, without moving a field to the bottom of its word first.
//
// An integer field at bit b is masked and converted in place, which gives its number times 2**b, exactly. A small
// float's field is moved so that its sign and exponent meet float32's; that gives its number times 2**(bias - 127),
// subnormals included. The powers of two go into the activations, which are prepared once for all output features:
// `input_factor`.
#pragma once

#include "vectors.h"

namespace fewbit {
namespace {

// Small floats come out about 2**-120 too small. The activations make up for 2**100, the weight's factor for the rest,
// so that neither overflows.
constexpr float kSmallFloatFactor = 0x1p100f;

template <class Vector, int bits>
struct IntegerFields {
  static constexpr int kSlots = 32 / bits;
  static constexpr bool kHasZero = true;

  template <int slot>
  static FEWBIT_INLINE typename Vector::Floats decode(typename Vector::Words word) {
    if constexpr (slot == kSlots - 1) {  // in place it would be taken for a sign
      return Vector::to_floats(Vector::template right<32 - bits>(word));
    } else {
      constexpr int32_t mask = static_cast<int32_t>(((1u << bits) - 1) << (slot * bits));
      return Vector::to_floats(Vector::bits_of(word, Vector::broadcast_word(mask)));
    }
  }

  static float input_factor(int slot) {
    return slot == kSlots - 1 ? 1.0f : 1.0f / static_cast<float>(1u << (slot * bits));
  }
};

// E2M1 by table: a code becomes the byte 2 * number + 12, which is read as an integer with a zero point of 12.
template <class Vector>
struct E2m1Fields {
  static constexpr int kSlots = 8;
  static constexpr bool kHasZero = true;
  using Bytes = IntegerFields<Vector, 8>;

  template <int slot>
  static FEWBIT_INLINE typename Vector::Floats decode(typename Vector::Words word) {
    alignas(16) static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    const auto nibbles = Vector::template right<slot % 2 * 4>(word);
    const auto bytes = Vector::look_up(kTable, Vector::bits_of(nibbles, Vector::broadcast_word(0x0f0f0f0f)));
    return Bytes::template decode<slot / 2>(bytes);
  }

  static float input_factor(int slot) { return Bytes::input_factor(slot / 2); }
};

template <class Vector, int field_bits, int code_bits, int exponent_bits>
struct FloatFields {
  static constexpr int kSlots = 32 / field_bits;
  static constexpr bool kHasZero = false;

  template <int slot>
  static FEWBIT_INLINE typename Vector::Floats decode(typename Vector::Words word) {
    constexpr int mantissa_bits = code_bits - 1 - exponent_bits;
    constexpr uint32_t magnitude = ((1u << (code_bits - 1)) - 1) << (23 - mantissa_bits);
    const auto top = Vector::template left<32 - code_bits - slot * field_bits>(word);
    const auto placed = Vector::template right_signed<8 - exponent_bits>(top);
    return Vector::as_floats(
        Vector::bits_of(placed, Vector::broadcast_word(static_cast<int32_t>(0x80000000u | magnitude))));
  }

  static float input_factor(int) { return kSmallFloatFactor; }
};

// Calls visit with the decoder of the element.
template <class Vector, class Visit>
void with_fields(Element element, Visit&& visit) {
  switch (element) {
    case Element::kInt2:
      return visit(IntegerFields<Vector, 2>{});
    case Element::kInt4:
      return visit(IntegerFields<Vector, 4>{});
    case Element::kInt8:
      return visit(IntegerFields<Vector, 8>{});
    case Element::kE2m1:
      return visit(E2m1Fields<Vector>{});
    case Element::kE4m3:
      return visit(FloatFields<Vector, 8, 8, 4>{});
    case Element::kE5m2:
      return visit(FloatFields<Vector, 8, 8, 5>{});
    case Element::kE2m3:
      return visit(FloatFields<Vector, 8, 6, 2>{});
    case Element::kE3m2:
      return visit(FloatFields<Vector, 8, 6, 3>{});
    case Element::kCount:
      return;
  }
}

}  // namespace
}  // namespace fewbit
