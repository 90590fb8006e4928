// The version of the C interface of this library; deepspeed_cad/native.py refuses a library with another one. Raise both
// whenever an exported function changes.
extern "C" __attribute__((visibility("default"))) int cad_abi_version() { return 9; }
