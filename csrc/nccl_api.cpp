#include "nccl_api.h"

#include <dlfcn.h>

#include <mutex>

#include "last_error.h"

namespace {

cad::Nccl api;
bool ready = false;
std::mutex opening;

template <typename Function>
bool find(void* library, Function& target, const char* name) {
    target = reinterpret_cast<Function>(dlsym(library, name));
    if (target == nullptr) cad::fail(1, "NCCL has no function %s: it is too old", name);
    return target != nullptr;
}

}  // namespace

namespace cad {

const Nccl* nccl() { return ready ? &api : nullptr; }

int check_nccl(int code, const char* call) {
    if (code == 0) return 0;
    return fail(code, "%s failed with NCCL error %d (%s)", call, code, ready ? api.get_error_string(code) : "unknown");
}

}  // namespace cad

// Finds NCCL: the one already loaded, else the file at `path` (libnccl.so.2 where null). Returns 0 or fails.
extern "C" __attribute__((visibility("default"))) int cad_nccl_open(const char* path) {
    std::lock_guard<std::mutex> guard(opening);
    if (ready) return 0;
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) library = dlopen(path == nullptr ? "libnccl.so.2" : path, RTLD_NOW);
    if (library == nullptr) return cad::fail(1, "no NCCL library: %s", dlerror());
    if (!find(library, api.get_version, "ncclGetVersion") ||
        !find(library, api.get_error_string, "ncclGetErrorString") ||
        !find(library, api.get_unique_id, "ncclGetUniqueId") ||
        !find(library, api.comm_init_rank, "ncclCommInitRank") ||
        !find(library, api.comm_destroy, "ncclCommDestroy") || !find(library, api.comm_abort, "ncclCommAbort") ||
        !find(library, api.group_start, "ncclGroupStart") || !find(library, api.group_end, "ncclGroupEnd") ||
        !find(library, api.send, "ncclSend") || !find(library, api.recv, "ncclRecv")) {
        return 1;
    }
    ready = true;
    return 0;
}
