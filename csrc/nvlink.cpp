// One exchange by peer copies: every slice of every field is a strided two-dimensional copy into a peer's landing
// area, on one stream, followed by writes of what the exchange is (its name) and of its number to that peer's flag.
// Copies run on copy engines; nothing here launches a kernel or waits on the host.
#include <cstdint>

#include "cuda_driver.h"
#include "last_error.h"

namespace {

// One tensor of an exchange. Behind it in memory: the landing address of this field on every rank.
struct Field {
    std::int64_t kind;
    std::int64_t source;
    std::int64_t row_stride;    // bytes
    std::int64_t group_stride;  // bytes
    std::int64_t width;         // bytes of one row of one head group
};
constexpr std::int64_t kFieldColumns = 5;

struct Slice {
    std::int64_t kind;
    std::int64_t source_row;
    std::int64_t group;
    std::int64_t landing_row;
    std::int64_t rows;
};

int enter(const cad::CudaDriver* driver, void* context) {
    if (driver == nullptr) return cad::fail(1, "cad_cuda_open has not been called");
    void* current = nullptr;
    if (int code = cad::check_cuda(driver->ctx_get_current(&current), "cuCtxGetCurrent")) return code;
    if (current == context) return 0;
    return cad::check_cuda(driver->ctx_set_current(context), "cuCtxSetCurrent");
}

int copy_slice(const cad::CudaDriver& driver, const Field& field, const Slice& slice, std::int64_t landing,
               cad::CudaStream stream) {
    const auto source = static_cast<cad::CudaAddress>(field.source + slice.source_row * field.row_stride +
                                                      slice.group * field.group_stride);
    const auto target = static_cast<cad::CudaAddress>(landing + slice.landing_row * field.width);
    const auto width = static_cast<std::size_t>(field.width);
    const auto rows = static_cast<std::size_t>(slice.rows);
    if (field.row_stride == field.width || rows == 1) {
        return cad::check_cuda(driver.copy(target, source, width * rows, stream), "cuMemcpyAsync");
    }
    cad::CudaCopy2D copy{};
    copy.src_type = copy.dst_type = cad::kMemoryUnified;
    copy.src_device = source;
    copy.src_pitch = static_cast<std::size_t>(field.row_stride);
    copy.dst_device = target;
    copy.dst_pitch = width;
    copy.width_bytes = width;
    copy.height = rows;
    return cad::check_cuda(driver.copy_2d(&copy, stream), "cuMemcpy2DAsync");
}

}  // namespace

// Enqueues one exchange on `stream`.
//   peers [steps]: the ranks in the order in which they are served; begin [steps + 1]: their parts of `slices`
//   slices [n, 5]: columns of Slice, grouped by peer; fields [field_count, 5 + ranks]: Field, then landing addresses
//   flags [ranks]: where this rank's number is written at each rank; value: the number of the exchange
//   names [ranks]: where its name, of 64 bits, is written ahead of the number; null where none is to be written
extern "C" __attribute__((visibility("default"))) int cad_nvlink_push(
    void* context, void* stream, std::int64_t ranks, std::int64_t steps, const std::int64_t* peers,
    const std::int64_t* begin, const std::int64_t* slices, std::int64_t field_count, const std::int64_t* fields,
    const std::int64_t* flags, std::uint32_t value, const std::int64_t* names, std::uint64_t name) {
    const cad::CudaDriver* driver = cad::cuda_driver();
    if (int code = enter(driver, context)) return code;
    const auto* table = reinterpret_cast<const Slice*>(slices);
    for (std::int64_t step = 0; step < steps; ++step) {
        const std::int64_t peer = peers[step];
        for (std::int64_t i = begin[step]; i < begin[step + 1]; ++i) {
            for (std::int64_t f = 0; f < field_count; ++f) {
                const std::int64_t* row = fields + f * (kFieldColumns + ranks);
                const Field& field = *reinterpret_cast<const Field*>(row);
                if (field.kind != table[i].kind || field.width == 0) continue;
                if (int code = copy_slice(*driver, field, table[i], row[kFieldColumns + peer], stream)) return code;
            }
        }
        if (names != nullptr) {
            // Two halves: not every GPU writes 64 bits from a stream. Who sees the flag sees both.
            for (int half = 0; half < 2; ++half) {
                const auto at = static_cast<cad::CudaAddress>(names[peer]) + 4 * half;
                const auto bits = static_cast<std::uint32_t>(name >> (32 * half));
                if (int code = cad::check_cuda(driver->write_value(stream, at, bits, 0), "cuStreamWriteValue32")) {
                    return code;
                }
            }
        }
        const auto flag = static_cast<cad::CudaAddress>(flags[peer]);
        if (int code = cad::check_cuda(driver->write_value(stream, flag, value, 0), "cuStreamWriteValue32")) {
            return code;
        }
    }
    return 0;
}

// Makes `stream` wait until each of the `count` flags is at least `value` (compared so that it may wrap around).
extern "C" __attribute__((visibility("default"))) int cad_nvlink_wait(void* context, void* stream, std::int64_t count,
                                                                      const std::int64_t* flags,
                                                                      std::uint32_t value) {
    const cad::CudaDriver* driver = cad::cuda_driver();
    if (int code = enter(driver, context)) return code;
    for (std::int64_t i = 0; i < count; ++i) {
        const auto flag = static_cast<cad::CudaAddress>(flags[i]);
        if (int code = cad::check_cuda(driver->wait_value(stream, flag, value, 0), "cuStreamWaitValue32")) return code;
    }
    return 0;
}
