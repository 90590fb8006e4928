// A stand-in for libcuda.so.1 that works on host memory at once, so that exchanges can be tested without a GPU.
#include <cstdint>
#include <cstring>

namespace {
unsigned long long copies = 0;
struct Copy2D {
    std::size_t src_x, src_y;
    int src_type;
    const void* src_host;
    unsigned long long src_device;
    void* src_array;
    std::size_t src_pitch, dst_x, dst_y;
    int dst_type;
    void* dst_host;
    unsigned long long dst_device;
    void* dst_array;
    std::size_t dst_pitch, width, height;
};
}  // namespace

extern "C" {

int cuGetErrorString(int code, const char** text) {
    *text = code == 719 ? "a made-up failure" : "unknown";
    return 0;
}
int cuCtxGetCurrent(void** context) {
    *context = &copies;
    return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuMemcpyAsync(unsigned long long target, unsigned long long source, std::size_t bytes, void* stream) {
    if (stream == reinterpret_cast<void*>(13)) return 719;
    ++copies;
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes);
    return 0;
}
int cuMemcpy2DAsync_v2(const Copy2D* c, void* stream) {
    if (stream == reinterpret_cast<void*>(13)) return 719;
    if (c->src_type != 4 || c->dst_type != 4 || c->src_x || c->src_y || c->dst_x || c->dst_y) return 1;
    ++copies;
    for (std::size_t row = 0; row < c->height; ++row) {
        std::memcpy(reinterpret_cast<char*>(c->dst_device) + row * c->dst_pitch,
                    reinterpret_cast<const char*>(c->src_device) + row * c->src_pitch, c->width);
    }
    return 0;
}
int cuStreamWriteValue32_v2(void*, unsigned long long address, std::uint32_t value, unsigned) {
    *reinterpret_cast<std::uint32_t*>(address) = value;
    return 0;
}
// "Waits" by failing where a real stream would hang.
int cuStreamWaitValue32_v2(void*, unsigned long long address, std::uint32_t value, unsigned) {
    const auto ahead = static_cast<std::int32_t>(*reinterpret_cast<const std::uint32_t*>(address) - value);
    return ahead >= 0 ? 0 : 600;
}
unsigned long long fake_copies() { return copies; }

}  // extern "C"
