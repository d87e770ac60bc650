// PyTorch's launcher (xmla/torch_api/launcher.c) above a driver that notes launches instead of making them.

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define dlopen(name, flags) ((void*)(name))
#define dlsym(library, name) noting(name)

static void* noting(const char* name);

#include "xmla/torch_api/launcher.c"

static char noted[1 << 20];  // a line a launch
static size_t written;
static pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER;  // at a time: calls have no lock
static CUcontext context;
CUresult next_result = CUDA_SUCCESS;

static CUresult note_launch(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  (void)extra;
  pthread_mutex_lock(&one_launch);
  written += snprintf(noted + written, sizeof noted - written, "%lld %u %u %u %u %lld", (long long)(intptr_t)function,
                      config->gridDimX, config->blockDimX, config->sharedMemBytes, config->numAttrs,
                      (long long)(intptr_t)config->hStream);
  for (void** parameter = parameters; parameter[0] != parameter[1]; ++parameter) {  // the last two are scratch memory
    written += snprintf(noted + written, sizeof noted - written, " %lld", (long long)*(int64_t*)*parameter);
  }
  written += snprintf(noted + written, sizeof noted - written, "\n");
  pthread_mutex_unlock(&one_launch);
  return next_result;
}

static CUresult note_context(CUcontext* current) { return *current = context, CUDA_SUCCESS; }
static CUresult note_set(CUcontext given) { return context = given, CUDA_SUCCESS; }
static CUresult note_retain(CUcontext* given, CUdevice device) {
  return *given = (CUcontext)(intptr_t)(device + 1), CUDA_SUCCESS;
}
static CUresult note_error(CUresult result, const char** text) {
  (void)result;
  return *text = "an error of a test", CUDA_SUCCESS;
}

static void* noting(const char* name) {
  static const struct {
    const char* name;
    void* function;
  } functions[] = {
      {"cuLaunchKernelEx", note_launch}, {"cuCtxGetCurrent", note_context},          {"cuCtxSetCurrent", note_set},
      {"cuGetErrorString", note_error},  {"cuDevicePrimaryCtxRetain", note_retain},
  };
  for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i) {
    if (strcmp(functions[i].name, name) == 0) return functions[i].function;
  }
  return NULL;
}

// The lines since the last call, and the device whose context was entered, or −1.
const char* noted_launches(void) {
  noted[written] = 0;
  written = 0;
  return noted;
}
int noted_device(void) { return (int)(intptr_t)context - 1; }
