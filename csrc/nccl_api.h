// The NCCL entry points that this library uses, found at run time in the NCCL that torch has loaded.
#pragma once

#include <cstddef>

namespace cad {

using NcclComm = void*;

struct NcclUniqueId {
    char bytes[128];
};

constexpr int kNcclUint8 = 1;

struct Nccl {
    int (*get_version)(int*);
    const char* (*get_error_string)(int);
    int (*get_unique_id)(NcclUniqueId*);
    int (*comm_init_rank)(NcclComm*, int, NcclUniqueId, int);
    int (*comm_destroy)(NcclComm);
    int (*comm_abort)(NcclComm);
    int (*group_start)();
    int (*group_end)();
    int (*send)(const void*, std::size_t, int, int, NcclComm, void*);
    int (*recv)(void*, std::size_t, int, int, NcclComm, void*);
};

// The library that cad_nccl_open found, or null before.
const Nccl* nccl();

// 0, or the code with a message that names the call.
int check_nccl(int code, const char* call);

}  // namespace cad
