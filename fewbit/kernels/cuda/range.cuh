// Blocks stay: the work, tiles by steps of K, is cut into equal ranges, one for each cluster. `sums.cuh` tells what becomes
// of a tile where a range ends inside it.
struct Range {
    int first, end;
    __device__ __forceinline__ Range(int index, int clusters, int work)
        : first((u64)index * work / clusters), end((u64)(index + 1) * work / clusters) {}
};

