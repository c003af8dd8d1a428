// The reader and the writer of arrays.  A header is a Python dictionary of three known keys; nothing else is accepted.
#include "npy.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

namespace lite {
namespace {

constexpr int64_t kMaxHeader = 1 << 16, kMaxBytes = int64_t{1} << 40;
constexpr int32_t kMaxDims = 6;

struct TypeRow {
  int32_t dtype;
  const char* name;
  int64_t bytes;
};
constexpr TypeRow kTypes[] = {{PS_F32, "<f4", 4}, {PS_F16, "<f2", 2}, {PS_BF16, "<u2", 2}, {PS_I8, "|i1", 1},
                              {PS_I32, "<i4", 4}, {PS_U8, "|u1", 1},  {PS_I64, "<i8", 8},  {PS_BOOL, "|b1", 1}};

const TypeRow* find_type(int32_t dtype) {
  for (const TypeRow& row : kTypes) {
    if (row.dtype == dtype) return &row;
  }
  return nullptr;
}

bool fail(char* message, uint64_t bytes, const char* path, const char* what) {
  snprintf(message, bytes, "%s: %s", path, what);
  return false;
}

struct HeaderReader {
  const char* at;
  const char* end;

  void skip() {
    while (at < end && (*at == ' ' || *at == '\n')) ++at;
  }
  bool take(const char* text) {
    skip();
    const int64_t size = static_cast<int64_t>(strlen(text));
    if (end - at < size || memcmp(at, text, static_cast<size_t>(size)) != 0) return false;
    at += size;
    return true;
  }
  bool take_text(char* out, int64_t room) {
    if (!take("'")) return false;
    int64_t size = 0;
    while (at < end && *at != '\'' && size + 1 < room) out[size++] = *at++;
    out[size] = 0;
    return take("'");
  }
  bool take_shape(ps_array* out) {
    if (!take("(")) return false;
    while (!take(")")) {
      skip();
      int64_t size = 0;
      const char* const begin = at;
      for (; at < end && isdigit(static_cast<unsigned char>(*at)); ++at) {
        size = size * 10 + (*at - '0');
        if (size > kMaxBytes) return false;
      }
      if (at == begin || out->ndim == kMaxDims) return false;
      out->dims[out->ndim++] = size;
      take(",");
    }
    return true;
  }
  bool take_header(char* type, int64_t room, bool* fortran, ps_array* out) {
    if (!take("{")) return false;
    int found = 0;
    while (!take("}")) {
      char key[24];
      if (!take_text(key, sizeof(key)) || !take(":")) return false;
      if (strcmp(key, "descr") == 0 && !(found & 1)) {
        found |= 1;
        if (!take_text(type, room)) return false;
      } else if (strcmp(key, "fortran_order") == 0 && !(found & 2)) {
        found |= 2;
        *fortran = take("True");
        if (!*fortran && !take("False")) return false;
      } else if (strcmp(key, "shape") == 0 && !(found & 4)) {
        found |= 4;
        if (!take_shape(out)) return false;
      } else {
        return false;
      }
      take(",");
    }
    return found == 7;
  }
};

bool read_exactly(FILE* file, void* out, int64_t bytes) {
  return fread(out, 1, static_cast<size_t>(bytes), file) == static_cast<size_t>(bytes);
}

const char* read_file(FILE* file, int32_t dtype, Npy* out) {
  static const char* const damaged = "expected a file of numpy.save, got another or a damaged one";
  unsigned char start[12];
  if (!read_exactly(file, start, 10) || memcmp(start, "\x93NUMPY", 6) != 0) return damaged;
  int64_t bytes = start[8] | start[9] << 8;
  if (start[6] >= 2) {
    if (start[6] > 3 || !read_exactly(file, start + 10, 2)) return damaged;
    bytes |= int64_t{start[10]} << 16 | int64_t{start[11]} << 24;
  }
  if (bytes > kMaxHeader) return damaged;
  Array<char> header;
  header.reserve(bytes + 1);
  if (!read_exactly(file, header.data, bytes)) return damaged;
  HeaderReader reader{header.data, header.data + bytes};
  char type[16] = "";
  bool fortran = false;
  if (!reader.take_header(type, sizeof(type), &fortran, &out->array)) return damaged;
  const TypeRow* expected = find_type(dtype);
  static char text[96];
  snprintf(text, sizeof(text), "expected the type %s, got %s", expected ? expected->name : "of the input", type);
  if (!expected || strcmp(type, expected->name) != 0) return text;
  if (fortran && out->array.ndim > 1) return "expected an array in C's order, got Fortran's (numpy.ascontiguousarray)";
  out->array.dtype = dtype;
  int64_t size = expected->bytes;
  for (int32_t d = 0; d < out->array.ndim; ++d) {
    if (__builtin_mul_overflow(size, out->array.dims[d], &size) || size > kMaxBytes) return "the array is too large";
  }
  const long begin = ftell(file);
  if (begin < 0 || fseek(file, 0, SEEK_END) != 0 || ftell(file) - begin != size || fseek(file, begin, SEEK_SET) != 0) {
    return "expected as many bytes as its shape needs: the file is damaged";
  }
  out->data.reserve(size + 64);
  out->array.data = out->data.data;
  return read_exactly(file, out->data.data, size) ? nullptr : "it cannot be read";
}

}  // namespace

const char* npy_type(int32_t dtype) {
  const TypeRow* row = find_type(dtype);
  return row ? row->name : "?";
}

int64_t array_bytes(const ps_array& array) {
  const TypeRow* row = find_type(array.dtype);
  int64_t bytes = row ? row->bytes : 0;
  for (int32_t d = 0; d < array.ndim; ++d) bytes *= array.dims[d];
  return bytes;
}

bool read_npy(const char* path, int32_t dtype, Npy* out, char* message, uint64_t message_bytes) {
  FILE* file = fopen(path, "rb");
  if (!file) return fail(message, message_bytes, path, strerror(errno));
  const char* what = read_file(file, dtype, out);
  fclose(file);
  return !what || fail(message, message_bytes, path, what);
}

bool write_npy(const char* path, const ps_array& array, char* message, uint64_t message_bytes) {
  char header[512];
  int used =
      snprintf(header, sizeof(header), "{'descr': '%s', 'fortran_order': False, 'shape': (", npy_type(array.dtype));
  for (int32_t d = 0; d < array.ndim; ++d) {
    used += snprintf(header + used, sizeof(header) - static_cast<size_t>(used), "%lld,%s",
                     static_cast<long long>(array.dims[d]), d + 1 < array.ndim ? " " : "");
  }
  used += snprintf(header + used, sizeof(header) - static_cast<size_t>(used), "), }");
  while ((10 + used + 1) % 64) header[used++] = ' ';
  header[used++] = '\n';
  FILE* file = fopen(path, "wb");
  if (!file) return fail(message, message_bytes, path, strerror(errno));
  const unsigned char start[10] = {0x93,
                                   'N',
                                   'U',
                                   'M',
                                   'P',
                                   'Y',
                                   1,
                                   0,
                                   static_cast<unsigned char>(used & 255),
                                   static_cast<unsigned char>(used >> 8)};
  const size_t bytes = static_cast<size_t>(array_bytes(array));
  bool good = fwrite(start, 1, 10, file) == 10;
  good = good && fwrite(header, 1, static_cast<size_t>(used), file) == static_cast<size_t>(used);
  good = good && (bytes == 0 || fwrite(array.data, 1, bytes, file) == bytes);
  const int error = errno;
  good = fclose(file) == 0 && good;
  return good || fail(message, message_bytes, path, error ? strerror(error) : "it cannot be written");
}

}  // namespace lite
