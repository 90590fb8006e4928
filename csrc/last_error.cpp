#include "last_error.h"

#include <cstdarg>
#include <cstdio>

namespace {
thread_local char message[1024] = "";
}

namespace cad {

int fail(int code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    return code;
}

}  // namespace cad

extern "C" __attribute__((visibility("default"))) const char* cad_last_error() { return message; }
