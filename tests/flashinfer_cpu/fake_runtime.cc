// Just enough of a CUDA runtime for FlashInfer's planner: one H100 or H200 that copies from host to host. Compiled apart
// from planner.cu, where nvcc has its own declarations of these functions.
#include <cstddef>
#include <cstring>

namespace {
// cudaDeviceAttr
constexpr int kMultiProcessorCount = 16, kComputeCapabilityMajor = 75, kMaxSharedMemoryPerMultiprocessor = 81,
              kMaxSharedMemoryPerBlockOptin = 97;
}  // namespace

extern "C" {

int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}

int cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case kMultiProcessorCount: *value = 132; break;
    case kComputeCapabilityMajor: *value = 9; break;
    case kMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case kMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    default: *value = 0;
  }
  return 0;
}

int cudaMemcpyAsync(void* to, const void* from, size_t size, int, void*) {
  memcpy(to, from, size);
  return 0;
}

const char* cudaGetErrorString(int) { return "fake CUDA runtime"; }
void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaUnregisterFatBinary(void**) {}
}
