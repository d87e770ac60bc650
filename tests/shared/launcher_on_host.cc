// The launcher above a driver that notes launches instead of making them, as a custom call on the CPU.

#include <mutex>
#include <string>

#include "../../xmla/jax_api/launcher.cc"

namespace {

std::mutex one_call;                         // at a time: devices have threads of their own
std::string noted;                           // a line a launch
ffi::Span<const int32_t> argument_counts;    // of the launches to come
size_t launched;
CUresult next_result = CUDA_SUCCESS;

ffi::Error on_host(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Span<const int64_t> numbers,
                   ffi::Span<const int32_t> programs, ffi::Span<const int32_t> early,
                   ffi::Span<const int32_t> counts, ffi::Span<const int32_t> places,
                   ffi::Span<const int64_t> values, ffi::Span<const int32_t> mutated,
                   ffi::Span<const int32_t> updated) {
  std::lock_guard lock(one_call);
  argument_counts = counts;
  launched = 0;
  noted.clear();
  return execute(nullptr, 0, operands, results, numbers, programs, early, counts, places, values, mutated, updated);
}

}  // namespace

extern "C" {

CUresult cuGetErrorName(CUresult, const char** name) {
  *name = "CUDA_ERROR_OF_A_TEST";
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice) { return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext*) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule*, const void*) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(new std::string(name));
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute, int bytes) {
  *reinterpret_cast<std::string*>(function) += "+" + std::to_string(bytes);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void**) {
  noted += *reinterpret_cast<std::string*>(function);
  for (uint32_t fact : {config->gridDimX, config->blockDimX, config->sharedMemBytes, config->numAttrs}) {
    noted += " " + std::to_string(fact);
  }
  const int32_t count = argument_counts[launched++];
  for (int32_t i = 0; i < count + 2; ++i) noted += " " + std::to_string(*static_cast<int64_t*>(parameters[i]));
  noted += "\n";
  return next_result;
}

const char* noted_launches() { return noted.c_str(); }
void fail_with(int result) { next_result = static_cast<CUresult>(result); }
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(execute_on_host, on_host,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("kernels")
                                  .Attr<ffi::Span<const int32_t>>("programs")
                                  .Attr<ffi::Span<const int32_t>>("early")
                                  .Attr<ffi::Span<const int32_t>>("counts")
                                  .Attr<ffi::Span<const int32_t>>("places")
                                  .Attr<ffi::Span<const int64_t>>("values")
                                  .Attr<ffi::Span<const int32_t>>("mutated")
                                  .Attr<ffi::Span<const int32_t>>("updated"));
