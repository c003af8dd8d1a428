// The C API that loads custom ops from a shared library.  It has its own translation unit, so that a statically linked
// program that does not call it contains no dynamic loader.
#include <errno.h>
#include <stdlib.h>

#include "api/api.h"
#include "ops/loaded.h"

#ifndef PENSTOCK_NO_DLOPEN
#include <dlfcn.h>
#endif

using namespace ps;

#ifdef PENSTOCK_NO_DLOPEN
ps_status ps_ops_load(const char* path) {
  PS_TRY(require_path(path));
  return fail(PS_UNSUPPORTED,
              "%s: this build loads no libraries (PENSTOCK_DLOPEN): ps_ops_register takes a table of ops", path);
}
#else
namespace {

using Table = const ps_op_library* (*)(void);

ps_status load(const char* file, const char* path) {
  void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!library) return fail(PS_IO_ERROR, "%s", dlerror());  // the message begins with the path
  const Table table = reinterpret_cast<Table>(dlsym(library, "penstock_ops"));
  const ps_status status =
      table ? register_ops(table(), path)
            : fail(PS_INVALID_FILE, "expected a library with the function penstock_ops (penstock_op.h), got none");
  if (status == PS_OK) return PS_OK;  // it stays loaded: its functions will be called
  dlclose(library);
  return prefix(status, "%s: ", path);
}

}  // namespace

ps_status ps_ops_load(const char* path) {
  const FloatEnvironment environment;  // a library linked with -ffast-math changes it on loading
  PS_TRY(require_path(path));
  char* file = realpath(path, nullptr);  // an absolute path: the loader must not search for it
  if (!file) return fail(PS_IO_ERROR, "%s: %s", path, strerror(errno));
  const ps_status status = load(file, path);
  free(file);
  return status;
}
#endif
