// Numbers of 16 bits.
//
// Compile-time: HALF (fp16, else bf16).

#if HALF
#define FLOAT "f16"
#else
#define FLOAT "bf16"
#endif

__device__ __forceinline__ u32 round_pair(float low, float high) {
    u32 found;
    asm("cvt.rn." FLOAT "x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
    return found;
}

__device__ __forceinline__ float widen(u16 number) {
    float found;
    asm("{\n.reg .b16 a;\nmov.b16 a, %1;\ncvt.f32." FLOAT " %0, a;\n}" : "=f"(found) : "h"(number));
    return found;
}
