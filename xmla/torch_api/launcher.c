// The launches of a plan, one after the other, in one call from Python: xmla/torch_api/_launch.py says what it replaces.
//
// The driver's functions are those of the libcuda that the process has loaded; none is linked. Of Python it takes the
// limited API, so that a release's wheel has one library for all versions.

#define Py_LIMITED_API 0x030c0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda.h"

enum { kMostArguments = 512, kThreadsOfWarp = 32 };

static CUresult (*launch_kernel)(const CUlaunchConfig*, CUfunction, void**, void**);
static CUresult (*get_context)(CUcontext*);
static CUresult (*set_context)(CUcontext);
static CUresult (*retain_context)(CUcontext*, CUdevice);
static CUresult (*error_text)(CUresult, const char**);
static PyObject* data_ptr;

// An argument is a value, added to the address at its place among inputs, results and workspace, or a runtime size if
// its place is −1.
typedef struct {
  int32_t place;
  int64_t value;
} Argument;

typedef struct {
  CUfunction function;
  unsigned programs, warps, shared_bytes;
  int early;  // it may start before the one before it has ended
  Py_ssize_t count;
} Launch;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  CUdevice device;
  Py_ssize_t launch_count, argument_count;
  Launch* launches;
  Argument* arguments;  // of all launches
} Launches;

static int refuse(CUresult result) {
  const char* text = NULL;
  error_text(result, &text);
  PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", text ? text : "unknown error");
  return -1;
}

// The function that gives an item of what PySequence_Fast has made.
typedef PyObject* (*ItemOf)(PyObject*, Py_ssize_t);
static ItemOf item_of(PyObject* sequence) { return PyList_Check(sequence) ? PyList_GetItem : PyTuple_GetItem; }

static int address_of(PyObject* tensor, int64_t* address) {
  PyObject* number = PyObject_VectorcallMethod(data_ptr, &tensor, 1, NULL);
  if (number == NULL) return -1;
  *address = (int64_t)PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return PyErr_Occurred() ? -1 : 0;
}

// A thread that has called nothing of CUDA has no context.
static CUresult enter_context(CUdevice device) {
  CUcontext context = NULL;
  CUresult result = get_context(&context);
  if (result != CUDA_SUCCESS || context != NULL) return result;
  result = retain_context(&context, device);
  return result == CUDA_SUCCESS ? set_context(context) : result;
}

static CUresult launch_all(const Launches* self, CUstream stream, const int64_t* addresses) {
  int64_t values[kMostArguments], scratch = 0;  // Triton's kernels end with two pointers to scratch memory, unused here
  void* parameters[kMostArguments + 2];
  CUlaunchAttribute attribute = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                 .value.programmaticStreamSerializationAllowed = 1};
  const Argument* argument = self->arguments;
  for (Py_ssize_t i = 0; i < self->launch_count; ++i) {
    const Launch* launch = &self->launches[i];
    for (Py_ssize_t j = 0; j < launch->count; ++j, ++argument) {
      values[j] = argument->value + (argument->place < 0 ? 0 : addresses[argument->place]);
      parameters[j] = &values[j];
    }
    parameters[launch->count] = parameters[launch->count + 1] = &scratch;
    CUlaunchConfig config = {.gridDimX = launch->programs, .gridDimY = 1, .gridDimZ = 1,
                             .blockDimX = kThreadsOfWarp * launch->warps, .blockDimY = 1, .blockDimZ = 1,
                             .sharedMemBytes = launch->shared_bytes, .hStream = stream,
                             .attrs = &attribute, .numAttrs = launch->early};
    CUresult result = launch_kernel(&config, launch->function, parameters, NULL);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

// launches(stream, inputs, results, workspace): addresses, tensors, a tensor or None
static PyObject* call(PyObject* object, PyObject* const* args, size_t given, PyObject* names) {
  Launches* self = (Launches*)object;
  if (PyVectorcall_NARGS(given) != 4 || names != NULL) {
    PyErr_SetString(PyExc_TypeError, "launches are called with a stream, inputs, results and a workspace");
    return NULL;
  }
  CUstream stream = (CUstream)PyLong_AsUnsignedLongLong(args[0]);
  if (PyErr_Occurred()) return NULL;
  PyObject* inputs = PySequence_Fast(args[1], "inputs are a sequence");
  PyObject* results = inputs ? PySequence_Fast(args[2], "results are a sequence") : NULL;
  PyObject* done = NULL;
  if (results == NULL) goto end;
  Py_ssize_t reads = PySequence_Size(inputs), writes = PySequence_Size(results);
  if (reads + writes >= kMostArguments) {
    PyErr_SetString(PyExc_ValueError, "too many arrays");
    goto end;
  }
  int64_t addresses[kMostArguments];
  ItemOf input = item_of(inputs), written = item_of(results);
  for (Py_ssize_t i = 0; i < reads; ++i) addresses[i] = (int64_t)PyLong_AsUnsignedLongLong(input(inputs, i));
  if (PyErr_Occurred()) goto end;
  for (Py_ssize_t i = 0; i < writes; ++i) {
    if (address_of(written(results, i), &addresses[reads + i]) < 0) goto end;
  }
  addresses[reads + writes] = 0;
  if (args[3] != Py_None && address_of(args[3], &addresses[reads + writes]) < 0) goto end;
  CUresult result;
  Py_BEGIN_ALLOW_THREADS;
  result = enter_context(self->device);
  if (result == CUDA_SUCCESS) result = launch_all(self, stream, addresses);
  Py_END_ALLOW_THREADS;
  if (result == CUDA_SUCCESS) {
    done = Py_NewRef(Py_None);
  } else {
    refuse(result);
  }
end:
  Py_XDECREF(inputs);
  Py_XDECREF(results);
  return done;
}

static void release(PyObject* object) {
  Launches* self = (Launches*)object;
  PyTypeObject* type = Py_TYPE(object);
  PyMem_Free(self->launches);
  PyMem_Free(self->arguments);
  PyObject_Free(object);
  Py_DECREF(type);
}

// Launches(device, [(function, programs, warps, shared bytes, early, [(place, value), …]), …])
static PyObject* create(PyTypeObject* type, PyObject* args, PyObject* names) {
  int device;
  PyObject* given;
  if (!PyArg_ParseTuple(args, "iO!", &device, &PyList_Type, &given)) return NULL;
  Launches* self = (Launches*)PyType_GenericAlloc(type, 0);
  if (self == NULL) return NULL;
  self->call = call;
  self->device = device;
  self->launch_count = PyList_Size(given);
  self->launches = PyMem_Calloc(self->launch_count + 1, sizeof(Launch));
  for (Py_ssize_t i = 0; self->launches && i < self->launch_count; ++i) {
    Launch* launch = &self->launches[i];
    unsigned long long function;
    PyObject* arguments;
    if (!PyArg_ParseTuple(PyList_GetItem(given, i), "KIIIpO!", &function, &launch->programs, &launch->warps,
                          &launch->shared_bytes, &launch->early, &PyList_Type, &arguments)) {
      goto fail;
    }
    launch->function = (CUfunction)function;
    launch->count = PyList_Size(arguments);
    if (launch->count > kMostArguments) {
      PyErr_SetString(PyExc_ValueError, "too many arguments");
      goto fail;
    }
    Py_ssize_t count = self->argument_count + launch->count;
    Argument* more = PyMem_Realloc(self->arguments, (count + 1) * sizeof(Argument));
    if (more == NULL) goto fail;
    self->arguments = more;
    for (Py_ssize_t j = 0; j < launch->count; ++j) {
      Argument* argument = &more[self->argument_count + j];
      long long value;
      if (!PyArg_ParseTuple(PyList_GetItem(arguments, j), "iL", &argument->place, &value)) goto fail;
      argument->value = value;
    }
    self->argument_count = count;
  }
  if (self->launches != NULL) return (PyObject*)self;
fail:
  if (!PyErr_Occurred()) PyErr_NoMemory();
  Py_DECREF(self);
  return NULL;
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", Py_T_PYSSIZET, offsetof(Launches, call), Py_READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, create}, {Py_tp_dealloc, release}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members}, {0, NULL},
};
static PyType_Spec spec = {
    "xmla_launcher.Launches", sizeof(Launches), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots,
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "xmla_launcher", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_xmla_launcher(void) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == NULL) {
    PyErr_SetString(PyExc_ImportError, dlerror());
    return NULL;
  }
  *(void**)&launch_kernel = dlsym(driver, "cuLaunchKernelEx");
  *(void**)&get_context = dlsym(driver, "cuCtxGetCurrent");
  *(void**)&set_context = dlsym(driver, "cuCtxSetCurrent");
  *(void**)&retain_context = dlsym(driver, "cuDevicePrimaryCtxRetain");
  *(void**)&error_text = dlsym(driver, "cuGetErrorString");
  if (!launch_kernel || !get_context || !set_context || !retain_context || !error_text) {
    PyErr_SetString(PyExc_ImportError, "CUDA's driver lacks a function");
    return NULL;
  }
  data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* result = PyModule_Create(&module);
  PyObject* type = result ? PyType_FromSpec(&spec) : NULL;
  if (type == NULL || PyModule_AddObject(result, "Launches", type) < 0) return NULL;
  return result;
}
