// Vectors of 16 numbers: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace fewbit {
namespace {

struct Avx512 {
  using Floats = __m512;
  using Words = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kFloatTile = 8;
  static constexpr int kIntegerTile = 8;
  static constexpr int kPanelTile = 12;

  static Words load(const void* from) { return _mm512_loadu_si512(from); }
  static Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
  static void store_words(void* to, Words value) { _mm512_storeu_si512(to, value); }
  static Floats zero() { return _mm512_setzero_ps(); }
  static Words zero_words() { return _mm512_setzero_si512(); }
  static Floats broadcast(const float* from) { return _mm512_set1_ps(*from); }
  static Floats broadcast(float value) { return _mm512_set1_ps(value); }
  static Words broadcast_word(const int32_t* from) { return _mm512_set1_epi32(*from); }
  static Words broadcast_word(int32_t value) { return _mm512_set1_epi32(value); }
  static Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
  static Floats subtract_product(Floats sum, Floats a, Floats b) { return _mm512_fnmadd_ps(a, b, sum); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static float sum(Floats a) { return _mm512_reduce_add_ps(a); }
  static float largest(Floats a) { return _mm512_reduce_max_ps(a); }
  static Floats round_to_even(Floats a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Words to_words(Floats a) { return _mm512_cvtps_epi32(a); }
  static Floats to_floats(Words a) { return _mm512_cvtepi32_ps(a); }
  static Floats as_floats(Words a) { return _mm512_castsi512_ps(a); }
  static Words as_words(Floats a) { return _mm512_castps_si512(a); }
  static Words bits_of(Words a, Words mask) { return _mm512_and_si512(a, mask); }
  template <int n>
  static Words left(Words a) {
    return _mm512_slli_epi32(a, n);
  }
  template <int n>
  static Words right(Words a) {
    return _mm512_srli_epi32(a, n);
  }
  template <int n>
  static Words right_signed(Words a) {
    return _mm512_srai_epi32(a, n);
  }
  static Words right16(Words a) { return _mm512_srli_epi16(a, 8); }
  static Words add_words(Words a, Words b) { return _mm512_add_epi32(a, b); }
  static Words subtract_words(Words a, Words b) { return _mm512_sub_epi32(a, b); }
  static Words multiply_words(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
  static Words widen_bytes(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Words look_up(const uint8_t* table, Words bytes) {
    const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), bytes);
  }
  static Words pair_products(Words a, Words b) { return _mm512_madd_epi16(a, b); }
  static Words byte_pair_products(Words bytes, Words signed_bytes) { return _mm512_maddubs_epi16(bytes, signed_bytes); }
  static Words add_halves(Words a, Words b) { return _mm512_add_epi16(a, b); }
  static Words subtract_halves(Words a, Words b) { return _mm512_sub_epi16(a, b); }
  static Words subtract_bytes(Words a, Words b) { return _mm512_sub_epi8(a, b); }
  static Words join_halves(Words a, Words b) { return _mm512_mask_blend_epi16(0xaaaaaaaa, a, b); }
  static Words look_up_halves(const uint16_t* table, Words halves) {
    return _mm512_permutexvar_epi16(halves, _mm512_loadu_si512(table));
  }
  static void store_bytes(int8_t* to, Words value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(value));
  }
  static void store_narrow(int16_t* to, Words value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(value));
  }

  static Floats from_bf16(const void* from) {
    return as_floats(left<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)))));
  }
  static Floats from_f16(const void* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  }
  static void to_bf16(void* to, Floats value) {
    // Round to nearest, ties to even: add half a unit, less one where the kept part is even.
    const Words bits = as_words(value);
    const Words odd = bits_of(right<16>(bits), broadcast_word(1));
    const Words rounded = right<16>(add_words(bits, add_words(odd, broadcast_word(0x7fff))));
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi32_epi16(rounded));
  }
  static void to_f16(void* to, Floats value) {
    _mm256_storeu_si256(static_cast<__m256i*>(to),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  static constexpr bool kByteDotProducts = false;
};

#ifdef __AVX512VNNI__
struct Avx512Vnni : Avx512 {
  static constexpr bool kByteDotProducts = true;
  static Words add_byte_products(Words sum, Words bytes, Words signed_bytes) {
    return _mm512_dpbusd_epi32(sum, bytes, signed_bytes);
  }
};
#endif

#ifdef __AVX512BF16__
struct Avx512Bf16 : Avx512 {
  // sum += products of two bf16 numbers in each word. Subnormal numbers count as zero.
  static Floats add_bf16_products(Floats sum, Floats a, Floats b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};
#endif

}  // namespace
}  // namespace fewbit
