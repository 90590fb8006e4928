// How threads end when the interpreter goes down.
//
// A daemon thread that comes back from C++ while Python finalizes is ended by pthread_exit, which unwinds its stack. The
// first frame is one that may not be left that way (the destructor that takes the interpreter's lock again), so the C++
// runtime calls std::terminate and the whole process dies by SIGABRT, whatever exit code it was to have. Such a thread
// is better left where it is: the process ends in a moment, and nobody waits for a daemon.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdlib>

#include "last_error.h"

namespace {

using Handler = void (*)();

Handler before = nullptr;
int (*is_finalizing)() = nullptr;
void* (*current_exception_type)() = nullptr;
pthread_t main_thread;
bool ready = false;

// Anything else that terminates does so as before: the main thread, an exception, a moment before the interpreter ends.
void park() {
    const bool unwound = is_finalizing() != 0 && current_exception_type() == nullptr;
    while (unwound && pthread_equal(pthread_self(), main_thread) == 0) pause();
    if (before != nullptr) before();
    std::abort();
}

}  // namespace

// Called on the main thread when the process is about to end. Returns 0 or fails where the C++ runtime that torch uses,
// or the interpreter, cannot be found.
extern "C" __attribute__((visibility("default"))) int cad_park_unwound_threads() {
    if (ready) return 0;
    // This library may have a C++ runtime of its own inside: what counts is the one that torch has loaded.
    void* runtime = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_NOLOAD);
    if (runtime == nullptr) return cad::fail(1, "libstdc++.so.6 is not loaded");
    auto set_terminate = reinterpret_cast<Handler (*)(Handler)>(dlsym(runtime, "_ZSt13set_terminatePFvvE"));
    current_exception_type = reinterpret_cast<void* (*)()>(dlsym(runtime, "__cxa_current_exception_type"));
    void* asked = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    if (asked == nullptr) asked = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");  // its name before Python 3.13
    is_finalizing = reinterpret_cast<int (*)()>(asked);
    if (set_terminate == nullptr || current_exception_type == nullptr || is_finalizing == nullptr) {
        return cad::fail(1, "std::set_terminate or Py_IsFinalizing was not found");
    }
    main_thread = pthread_self();
    ready = true;
    before = set_terminate(park);
    return 0;
}
