// The message of the last failure on this thread: functions of this library return a code, the text is fetched apart.
#pragma once

namespace cad {

// Keeps the formatted message and returns `code`, so that a caller can `return fail(1, "...")`.
int fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace cad
