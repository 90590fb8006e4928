#include "cuda_driver.h"

#include <dlfcn.h>

#include <mutex>

#include "last_error.h"

namespace {

cad::CudaDriver driver;
bool ready = false;
std::mutex opening;

template <typename Function>
bool find(void* library, Function& target, const char* name, const char* older_name = nullptr) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr && older_name != nullptr) symbol = dlsym(library, older_name);
    target = reinterpret_cast<Function>(symbol);
    if (symbol == nullptr) cad::fail(1, "the CUDA driver has no function %s: it is too old", name);
    return symbol != nullptr;
}

}  // namespace

namespace cad {

const CudaDriver* cuda_driver() { return ready ? &driver : nullptr; }

int check_cuda(int code, const char* call) {
    if (code == 0) return 0;
    const char* text = nullptr;
    if (ready) driver.get_error_string(code, &text);
    return fail(code, "%s failed with CUDA error %d (%s)", call, code, text == nullptr ? "unknown" : text);
}

}  // namespace cad

// Finds the driver. `path` is normally null: libcuda.so.1, first the one already loaded. Returns 0 or fails.
extern "C" __attribute__((visibility("default"))) int cad_cuda_open(const char* path) {
    std::lock_guard<std::mutex> guard(opening);
    if (ready) return 0;
    const char* name = path == nullptr ? "libcuda.so.1" : path;
    void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) library = dlopen(name, RTLD_NOW);
    if (library == nullptr) return cad::fail(1, "no CUDA driver: %s", dlerror());
    if (!find(library, driver.get_error_string, "cuGetErrorString") ||
        !find(library, driver.ctx_get_current, "cuCtxGetCurrent") ||
        !find(library, driver.ctx_set_current, "cuCtxSetCurrent") ||
        !find(library, driver.copy, "cuMemcpyAsync") ||
        !find(library, driver.copy_2d, "cuMemcpy2DAsync_v2", "cuMemcpy2DAsync") ||
        !find(library, driver.write_value, "cuStreamWriteValue32_v2", "cuStreamWriteValue32") ||
        !find(library, driver.wait_value, "cuStreamWaitValue32_v2", "cuStreamWaitValue32")) {
        return 1;
    }
    ready = true;
    return 0;
}

// The context that is current on the calling thread; kept by the caller and handed to every later call, because
// another thread (autograd's) may have none.
extern "C" __attribute__((visibility("default"))) int cad_cuda_context(void** context) {
    if (!ready) return cad::fail(1, "cad_cuda_open has not been called");
    if (int code = cad::check_cuda(driver.ctx_get_current(context), "cuCtxGetCurrent")) return code;
    return *context == nullptr ? cad::fail(1, "no CUDA context is current on this thread") : 0;
}
