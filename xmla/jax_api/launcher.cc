// An XLA custom call that launches the kernels of a plan, one after the other, on the stream of the computation.
//
// Its operands are the arrays of an op's call, its results those of the call and its workspace. A launch may start
// before the one before it has ended (programmatic dependent launch), which jaxlib's own call of a kernel cannot do.
// A program names a kernel by a number, under which `xmla_add_kernel` has made it known to this process. XLA has them
// loaded onto a device before it runs the program there, or captures it as a CUDA graph.
// The driver's functions are those of the libcuda that the process has loaded; none is linked.

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cuda.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int32_t kDevices = 64;
constexpr uint32_t kThreadsOfWarp = 32;
constexpr uint32_t kSharedWithoutAsking = 48 << 10;

struct Kernel {
  std::string name;
  std::string cubin;
  uint32_t warps;
  uint32_t shared_bytes;
  std::array<std::atomic<CUfunction>, kDevices> functions{};  // by device; null until it is loaded there
};

std::shared_mutex kernels_mutex;
std::unordered_map<int64_t, std::unique_ptr<Kernel>> kernels;  // grows only, so that pointers to kernels stay valid

ffi::Error failure(CUresult result, const char* step, const Kernel& kernel, int32_t device) {
  const char* name = nullptr;
  cuGetErrorName(result, &name);
  return ffi::Error::Internal("xmla: " + std::string(step) + " of " + kernel.name + " on device " +
                              std::to_string(device) + ": " + (name ? name : std::to_string(result)));
}

// Loads `kernel` onto `device`, whose context is current. It stays there as long as the process.
CUresult load_here(Kernel& kernel, int32_t device) {
  CUmodule module;
  CUfunction function;
  CUresult result = cuModuleLoadData(&module, kernel.cubin.data());
  if (result == CUDA_SUCCESS) result = cuModuleGetFunction(&function, module, kernel.name.c_str());
  if (result == CUDA_SUCCESS && kernel.shared_bytes > kSharedWithoutAsking) {
    result = cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes);
  }
  if (result == CUDA_SUCCESS) kernel.functions[device].store(function);
  return result;
}

// The same in any context: XLA uses the device's primary one.
CUresult load(Kernel& kernel, int32_t device) {
  static std::mutex loading;
  std::lock_guard lock(loading);
  if (kernel.functions[device].load() != nullptr) return CUDA_SUCCESS;
  CUdevice handle;
  CUcontext context;
  CUresult result = cuDeviceGet(&handle, device);
  if (result == CUDA_SUCCESS) result = cuDevicePrimaryCtxRetain(&context, handle);
  if (result == CUDA_SUCCESS) result = cuCtxPushCurrent(context);
  if (result != CUDA_SUCCESS) return result;
  result = load_here(kernel, device);
  CUresult popped = cuCtxPopCurrent(&context);
  return result == CUDA_SUCCESS ? popped : result;
}

// The kernel of a number, loaded onto `device`.
ffi::ErrorOr<Kernel*> find_kernel(int64_t number, int32_t device) {
  Kernel* kernel = nullptr;
  {
    std::shared_lock lock(kernels_mutex);
    if (auto found = kernels.find(number); found != kernels.end()) kernel = found->second.get();
  }
  if (kernel == nullptr) {
    return ffi::Unexpected(ffi::Error(
        XLA_FFI_Error_Code_FAILED_PRECONDITION,
        "xmla: a kernel of this program is unknown: another process has compiled the program; lower it in this one, "
        "or use jax.export"));
  }
  if (device < 0 || device >= kDevices) {
    return ffi::Unexpected(ffi::Error::Internal("xmla: device " + std::to_string(device) + " of at most 64"));
  }
  if (kernel->functions[device].load() == nullptr) {
    if (CUresult result = load(*kernel, device); result != CUDA_SUCCESS) {
      return ffi::Unexpected(failure(result, "loading", *kernel, device));
    }
  }
  return kernel;
}

ffi::Error initialize(int32_t device, ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  auto numbers = attributes.get<ffi::Span<const int64_t>>("kernels");
  if (numbers.has_error()) return numbers.error();
  for (int64_t number : *numbers) {
    if (auto kernel = find_kernel(number, device); kernel.has_error()) return kernel.error();
  }
  return ffi::Error::Success();
}

// A launch takes the next `counts[i]` arguments. An argument is a value, added to the address of the buffer at its
// place among operands and results, or a runtime size if its place is −1. Operand `mutated[i]` and result `updated[i]`
// are one array, which the launches address as the operand.
ffi::Error execute(CUstream stream, int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Span<const int64_t> numbers, ffi::Span<const int32_t> programs,
                   ffi::Span<const int32_t> early, ffi::Span<const int32_t> counts, ffi::Span<const int32_t> places,
                   ffi::Span<const int64_t> values, ffi::Span<const int32_t> mutated,
                   ffi::Span<const int32_t> updated) {
  std::vector<int64_t> addresses;
  for (size_t i = 0; i < operands.size(); ++i) {
    auto operand = operands.get<ffi::AnyBuffer>(i);
    if (operand.has_error()) return operand.error();
    addresses.push_back(reinterpret_cast<int64_t>(operand->untyped_data()));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    addresses.push_back(reinterpret_cast<int64_t>((*result)->untyped_data()));
  }
  auto empty = [&](int32_t place) { return operands.get<ffi::AnyBuffer>(place)->size_bytes() == 0; };
  for (size_t i = 0; i < mutated.size(); ++i) {
    if (empty(mutated[i])) continue;  // whose address may be anybody's
    if (addresses[mutated[i]] != addresses[operands.size() + updated[i]]) {
      return ffi::Error::Internal("xmla: XLA has given operand " + std::to_string(mutated[i]) +
                                  ", which is updated in place, and its new value two places in memory; please report "
                                  "the program");
    }
    for (size_t j = 0; j < i; ++j) {
      if (!empty(mutated[j]) && addresses[mutated[i]] == addresses[mutated[j]]) {
        return ffi::Error::Internal("xmla: XLA has given operands " + std::to_string(mutated[j]) + " and " +
                                    std::to_string(mutated[i]) +
                                    ", which are both updated in place, one place in memory; please report the "
                                    "program");
      }
    }
  }
  std::vector<int64_t> arguments(values.begin(), values.end());  // of a size the kernel reads the low 32 bits
  std::vector<void*> parameters;
  int64_t scratch = 0;  // Triton's kernels end with two pointers to scratch memory, which no kernel here needs
  size_t next = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    auto found = find_kernel(numbers[i], device);
    if (found.has_error()) return found.error();
    const Kernel& kernel = **found;
    parameters.clear();
    for (int32_t left = counts[i]; left > 0; --left, ++next) {
      if (places[next] >= 0) arguments[next] += addresses[places[next]];
      parameters.push_back(&arguments[next]);
    }
    parameters.insert(parameters.end(), {&scratch, &scratch});
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = programs[i];
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = kThreadsOfWarp * kernel.warps;
    config.sharedMemBytes = kernel.shared_bytes;
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = early[i];
    CUresult result = cuLaunchKernelEx(&config, kernel.functions[device].load(), parameters.data(), nullptr);
    if (result != CUDA_SUCCESS) return failure(result, "launch", kernel, device);
  }
  return ffi::Error::Success();
}

}  // namespace

extern "C" void xmla_add_kernel(int64_t number, const char* name, const char* cubin, uint64_t bytes, uint32_t warps,
                                uint32_t shared_bytes) {
  auto kernel = std::make_unique<Kernel>();
  kernel->name = name;
  kernel->cubin.assign(cubin, bytes);
  kernel->warps = warps;
  kernel->shared_bytes = shared_bytes;
  std::unique_lock lock(kernels_mutex);
  kernels.emplace(number, std::move(kernel));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(xmla_initialize, initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(xmla_execute, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("kernels")
                                  .Attr<ffi::Span<const int32_t>>("programs")
                                  .Attr<ffi::Span<const int32_t>>("early")
                                  .Attr<ffi::Span<const int32_t>>("counts")
                                  .Attr<ffi::Span<const int32_t>>("places")
                                  .Attr<ffi::Span<const int64_t>>("values")
                                  .Attr<ffi::Span<const int32_t>>("mutated")
                                  .Attr<ffi::Span<const int32_t>>("updated"),
                              {ffi::Traits::kCmdBufferCompatible});
