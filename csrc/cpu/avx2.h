// Vectors of 8 numbers: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace fewbit {
namespace {

struct Avx2 {
  using Floats = __m256;
  using Words = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kFloatTile = 6;  // tokens at a time: 2 x 6 sums, 2 weights and an input fill the registers
  static constexpr int kIntegerTile = 4;
  static constexpr int kPanelTile = 6;

  static Words load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static Floats load_floats(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
  static void store_words(void* to, Words value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }
  static Floats zero() { return _mm256_setzero_ps(); }
  static Words zero_words() { return _mm256_setzero_si256(); }
  static Floats broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  static Floats broadcast(float value) { return _mm256_set1_ps(value); }
  static Words broadcast_word(const int32_t* from) {
    return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(from)));
  }
  static Words broadcast_word(int32_t value) { return _mm256_set1_epi32(value); }
  static Floats multiply_add(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
  static Floats subtract_product(Floats sum, Floats a, Floats b) { return _mm256_fnmadd_ps(a, b, sum); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  static Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static float sum(Floats a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  static float largest(Floats a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
  }
  static Floats round_to_even(Floats a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Words to_words(Floats a) { return _mm256_cvtps_epi32(a); }
  static Floats to_floats(Words a) { return _mm256_cvtepi32_ps(a); }
  static Floats as_floats(Words a) { return _mm256_castsi256_ps(a); }
  static Words as_words(Floats a) { return _mm256_castps_si256(a); }
  static Words bits_of(Words a, Words mask) { return _mm256_and_si256(a, mask); }
  template <int n>
  static Words left(Words a) {
    return _mm256_slli_epi32(a, n);
  }
  template <int n>
  static Words right(Words a) {
    return _mm256_srli_epi32(a, n);
  }
  template <int n>
  static Words right_signed(Words a) {
    return _mm256_srai_epi32(a, n);
  }
  static Words right16(Words a) { return _mm256_srli_epi16(a, 8); }
  static Words add_words(Words a, Words b) { return _mm256_add_epi32(a, b); }
  static Words subtract_words(Words a, Words b) { return _mm256_sub_epi32(a, b); }
  static Words multiply_words(Words a, Words b) { return _mm256_mullo_epi32(a, b); }
  static Words widen_bytes(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  // The table's entry for each byte, which is less than 16.
  static Words look_up(const uint8_t* table, Words bytes) {
    const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), bytes);
  }
  // Sums of two products of 16-bit numbers in each word.
  static Words pair_products(Words a, Words b) { return _mm256_madd_epi16(a, b); }
  // Sums of two products of unsigned by signed bytes in each half-word; the caller keeps them below 2**15.
  static Words byte_pair_products(Words bytes, Words signed_bytes) { return _mm256_maddubs_epi16(bytes, signed_bytes); }
  static Words add_halves(Words a, Words b) { return _mm256_add_epi16(a, b); }
  static Words subtract_halves(Words a, Words b) { return _mm256_sub_epi16(a, b); }
  static Words subtract_bytes(Words a, Words b) { return _mm256_sub_epi8(a, b); }
  // The low half of each word of `a`, the high one of `b`.
  static Words join_halves(Words a, Words b) { return _mm256_blend_epi16(a, b, 0xaa); }
  // Each word as 8 bits.
  static void store_bytes(int8_t* to, Words value) {
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(value), _mm256_extracti128_si256(value, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves, halves));
  }
  // Each word as 16 bits.
  static void store_narrow(int16_t* to, Words value) {
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(value, value), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(halves));
  }

  static Floats from_bf16(const void* from) {
    return as_floats(left<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)))));
  }
  static Floats from_f16(const void* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  static void to_bf16(void* to, Floats value) {
    // Round to nearest, ties to even: add half a unit, less one where the kept part is even.
    const Words bits = as_words(value);
    const Words odd = bits_of(right<16>(bits), broadcast_word(1));
    const Words rounded = right<16>(add_words(bits, add_words(odd, broadcast_word(0x7fff))));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(halves));
  }
  static void to_f16(void* to, Floats value) {
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }

  // sum += products of four bytes in each word: weight bytes unsigned, activation bytes signed.
  static constexpr bool kByteDotProducts = false;
};

#ifdef __AVXVNNI__
struct Avx2Vnni : Avx2 {
  static constexpr bool kByteDotProducts = true;
  static Words add_byte_products(Words sum, Words bytes, Words signed_bytes) {
    return _mm256_dpbusd_avx_epi32(sum, bytes, signed_bytes);
  }
};
#endif

}  // namespace
}  // namespace fewbit
