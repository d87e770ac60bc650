// Stands in for custom calls of kernels: XLA compiles a call of a target for a GPU only if the target has a handler.
// In C, which compiles in a moment; XLA's header for C++ takes two seconds of every process.

#include "xla/ffi/api/c_api.h"

XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Metadata_Extension* extension = (XLA_FFI_Metadata_Extension*)frame->extension_start;
  if (extension != NULL && extension->extension_base.type == XLA_FFI_Extension_Metadata) {
    extension->metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    extension->metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    extension->metadata->traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
  }
  return NULL;
}
