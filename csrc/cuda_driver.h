// The few CUDA driver types and entry points that this library uses, found at run time: nothing of CUDA is needed to
// build it, and the driver that the process has loaded already is the one that is used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cad {

using CudaStream = void*;
using CudaContext = void*;
using CudaAddress = unsigned long long;

constexpr int kMemoryUnified = 4;  // CU_MEMORYTYPE_UNIFIED: the address itself says which device

// CUDA_MEMCPY2D of the driver interface (version 2).
struct CudaCopy2D {
    std::size_t src_x_bytes;
    std::size_t src_y;
    int src_type;
    const void* src_host;
    CudaAddress src_device;
    void* src_array;
    std::size_t src_pitch;
    std::size_t dst_x_bytes;
    std::size_t dst_y;
    int dst_type;
    void* dst_host;
    CudaAddress dst_device;
    void* dst_array;
    std::size_t dst_pitch;
    std::size_t width_bytes;
    std::size_t height;
};

struct CudaDriver {
    int (*get_error_string)(int, const char**);
    int (*ctx_get_current)(CudaContext*);
    int (*ctx_set_current)(CudaContext);
    int (*copy)(CudaAddress, CudaAddress, std::size_t, CudaStream);
    int (*copy_2d)(const CudaCopy2D*, CudaStream);
    int (*write_value)(CudaStream, CudaAddress, std::uint32_t, unsigned);
    int (*wait_value)(CudaStream, CudaAddress, std::uint32_t, unsigned);
};

// The driver that cad_cuda_open found, or null before.
const CudaDriver* cuda_driver();

// 0, or the code with a message that names the call.
int check_cuda(int code, const char* call);

}  // namespace cad
