// One exchange by NCCL: all sends and receives of this rank in one group call, on a communicator of its own.
#include <cstdint>

#include "last_error.h"
#include "nccl_api.h"

namespace {

struct Message {
    std::int64_t is_send;
    std::int64_t peer;
    std::int64_t address;
    std::int64_t bytes;
};

int not_open() { return cad::fail(1, "cad_nccl_open has not been called"); }

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int cad_nccl_version(int* version) {
    const cad::Nccl* api = cad::nccl();
    return api == nullptr ? not_open() : cad::check_nccl(api->get_version(version), "ncclGetVersion");
}

// Writes the 128 bytes that all ranks of a new communicator need.
__attribute__((visibility("default"))) int cad_nccl_unique_id(char* bytes) {
    const cad::Nccl* api = cad::nccl();
    if (api == nullptr) return not_open();
    return cad::check_nccl(api->get_unique_id(reinterpret_cast<cad::NcclUniqueId*>(bytes)), "ncclGetUniqueId");
}

// Joins the communicator on the current device; returns once all ranks have.
__attribute__((visibility("default"))) int cad_nccl_join(const char* bytes, int ranks, int rank, void** communicator) {
    const cad::Nccl* api = cad::nccl();
    if (api == nullptr) return not_open();
    const auto& id = *reinterpret_cast<const cad::NcclUniqueId*>(bytes);
    return cad::check_nccl(api->comm_init_rank(communicator, ranks, id, rank), "ncclCommInitRank");
}

// Enqueues `count` messages ([count, 4]: is_send, peer, address, bytes) as one group on `stream`.
__attribute__((visibility("default"))) int cad_nccl_exchange(void* communicator, void* stream, std::int64_t count,
                                                             const std::int64_t* messages) {
    const cad::Nccl* api = cad::nccl();
    if (api == nullptr) return not_open();
    if (count == 0) return 0;
    const auto* table = reinterpret_cast<const Message*>(messages);
    if (int code = cad::check_nccl(api->group_start(), "ncclGroupStart")) return code;
    int failed = 0;
    for (std::int64_t i = 0; i < count && failed == 0; ++i) {
        const Message& message = table[i];
        void* buffer = reinterpret_cast<void*>(message.address);
        const auto bytes = static_cast<std::size_t>(message.bytes);
        const int peer = static_cast<int>(message.peer);
        failed = message.is_send != 0 ? api->send(buffer, bytes, cad::kNcclUint8, peer, communicator, stream)
                                      : api->recv(buffer, bytes, cad::kNcclUint8, peer, communicator, stream);
    }
    const int ended = api->group_end();
    if (failed != 0) return cad::check_nccl(failed, "ncclSend or ncclRecv");
    return cad::check_nccl(ended, "ncclGroupEnd");
}

// Leaves the communicator; `abort` stops what is under way instead of letting it finish.
__attribute__((visibility("default"))) int cad_nccl_leave(void* communicator, int abort) {
    const cad::Nccl* api = cad::nccl();
    if (api == nullptr) return not_open();
    if (abort != 0) return cad::check_nccl(api->comm_abort(communicator), "ncclCommAbort");
    return cad::check_nccl(api->comm_destroy(communicator), "ncclCommDestroy");
}

}  // extern "C"
