// The launches of a plan, one after the other, in one call from Python: xmla/torch_api/_launch.py says what it replaces.
//
// Kernels are those of all calls that differ in sizes alone; called with the numbers of one they give its Launches.
//
// The driver's functions are those of the libcuda that the process has loaded; none is linked. Of Python it takes the
// limited API, so that a release's wheel has one library for all versions. Free-threaded Python has no limited API; there
// it is compiled where it runs, and threads launch at once: `Kernels` and `Launches` do not change once they are made.

#include <pyconfig.h>  // says which Python it is
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030c0000
#endif
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

// An argument is the address at its place among inputs, results and workspace, and the number at its index is added.
// A runtime size has no address, most arrays have no number: −1.
typedef struct {
  int32_t place, number;
} Argument;

typedef struct {
  CUfunction function;
  unsigned warps, ctas, shared_bytes;
  int early;  // it may start before the one before it has ended
  int programs;  // the index of their number
  Py_ssize_t count;
} Kernel;

typedef struct {
  PyObject_HEAD
  CUdevice device;
  Py_ssize_t kernel_count, argument_count, number_count;
  Kernel* kernels;
  Argument* arguments;  // of all kernels
} Kernels;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  Kernels* kernels;
  int64_t numbers[];
} Launches;

static PyTypeObject* launches_type;

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
  const Argument* argument = self->kernels->arguments;
  for (Py_ssize_t i = 0; i < self->kernels->kernel_count; ++i) {
    const Kernel* kernel = &self->kernels->kernels[i];
    for (Py_ssize_t j = 0; j < kernel->count; ++j, ++argument) {
      values[j] = argument->place < 0 ? 0 : addresses[argument->place];
      values[j] += argument->number < 0 ? 0 : self->numbers[argument->number];
      parameters[j] = &values[j];
    }
    parameters[kernel->count] = parameters[kernel->count + 1] = &scratch;
    CUlaunchConfig config = {.gridDimX = (unsigned)self->numbers[kernel->programs] * kernel->ctas,
                             .gridDimY = 1, .gridDimZ = 1,
                             .blockDimX = kThreadsOfWarp * kernel->warps, .blockDimY = 1, .blockDimZ = 1,
                             .sharedMemBytes = kernel->shared_bytes, .hStream = stream,
                             .attrs = &attribute, .numAttrs = kernel->early};
    CUresult result = launch_kernel(&config, kernel->function, parameters, NULL);
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
  result = enter_context(self->kernels->device);
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

static void release_launches(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  Py_DECREF(((Launches*)object)->kernels);
  PyObject_Free(object);
  Py_DECREF(type);
}

// kernels(numbers): those of a call, as a tuple
static PyObject* sized(PyObject* object, PyObject* args, PyObject* names) {
  Kernels* self = (Kernels*)object;
  PyObject* numbers;
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &numbers)) return NULL;
  Py_ssize_t count = PyTuple_Size(numbers);
  if (count < self->number_count) {
    PyErr_SetString(PyExc_ValueError, "there are fewer numbers than the launches name");
    return NULL;
  }
  Launches* launches = (Launches*)PyObject_Malloc(offsetof(Launches, numbers) + count * sizeof(int64_t));
  if (launches == NULL) return PyErr_NoMemory();
  PyObject_Init((PyObject*)launches, launches_type);
  launches->call = call;
  launches->kernels = (Kernels*)Py_NewRef(object);
  for (Py_ssize_t i = 0; i < count; ++i) launches->numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(numbers, i));
  if (!PyErr_Occurred()) return (PyObject*)launches;
  Py_DECREF(launches);
  return NULL;
}

static void release_kernels(PyObject* object) {
  Kernels* self = (Kernels*)object;
  PyTypeObject* type = Py_TYPE(object);
  PyMem_Free(self->kernels);
  PyMem_Free(self->arguments);
  PyObject_Free(object);
  Py_DECREF(type);
}

static void need(Kernels* self, int number) {
  if (number >= self->number_count) self->number_count = number + 1;
}

// Kernels(device, [(function, warps, ctas, shared bytes, early, programs, ((place, number), …)), …])
static PyObject* create(PyTypeObject* type, PyObject* args, PyObject* names) {
  int device;
  PyObject* given;
  if (!PyArg_ParseTuple(args, "iO!", &device, &PyList_Type, &given)) return NULL;
  Kernels* self = (Kernels*)PyType_GenericAlloc(type, 0);
  if (self == NULL) return NULL;
  self->device = device;
  self->kernel_count = PyList_Size(given);
  self->kernels = PyMem_Calloc(self->kernel_count + 1, sizeof(Kernel));
  for (Py_ssize_t i = 0; self->kernels && i < self->kernel_count; ++i) {
    Kernel* kernel = &self->kernels[i];
    unsigned long long function;
    PyObject* arguments;
    if (!PyArg_ParseTuple(PyList_GetItem(given, i), "KIIIpiO!", &function, &kernel->warps, &kernel->ctas,
                          &kernel->shared_bytes, &kernel->early, &kernel->programs, &PyTuple_Type, &arguments)) {
      goto fail;
    }
    kernel->function = (CUfunction)function;
    kernel->count = PyTuple_Size(arguments);
    need(self, kernel->programs);
    if (kernel->count > kMostArguments) {
      PyErr_SetString(PyExc_ValueError, "too many arguments");
      goto fail;
    }
    Py_ssize_t count = self->argument_count + kernel->count;
    Argument* more = PyMem_Realloc(self->arguments, (count + 1) * sizeof(Argument));
    if (more == NULL) goto fail;
    self->arguments = more;
    for (Py_ssize_t j = 0; j < kernel->count; ++j) {
      Argument* argument = &more[self->argument_count + j];
      if (!PyArg_ParseTuple(PyTuple_GetItem(arguments, j), "ii", &argument->place, &argument->number)) goto fail;
      need(self, argument->number);
    }
    self->argument_count = count;
  }
  if (self->kernels != NULL) return (PyObject*)self;
fail:
  if (!PyErr_Occurred()) PyErr_NoMemory();
  Py_DECREF(self);
  return NULL;
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", Py_T_PYSSIZET, offsetof(Launches, call), Py_READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot slots_of_launches[] = {
    {Py_tp_dealloc, release_launches}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, members}, {0, NULL},
};
static PyType_Spec spec_of_launches = {
    "xmla_launcher.Launches", sizeof(Launches), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots_of_launches,
};
static PyType_Slot slots_of_kernels[] = {
    {Py_tp_new, create}, {Py_tp_dealloc, release_kernels}, {Py_tp_call, sized}, {0, NULL},
};
static PyType_Spec spec_of_kernels = {
    "xmla_launcher.Kernels", sizeof(Kernels), 0, Py_TPFLAGS_DEFAULT, slots_of_kernels,
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
  launches_type = result ? (PyTypeObject*)PyType_FromSpec(&spec_of_launches) : NULL;
  PyObject* type = launches_type ? PyType_FromSpec(&spec_of_kernels) : NULL;
  if (type == NULL || PyModule_AddObject(result, "Kernels", type) < 0) return NULL;
#ifdef Py_GIL_DISABLED
  if (PyUnstable_Module_SetGIL(result, Py_MOD_GIL_NOT_USED) < 0) return NULL;  // importing it would turn the lock on
#endif
  return result;
}
