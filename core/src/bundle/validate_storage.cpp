// Validation of names, segments and the ranges of weights in the file.
#include <algorithm>

#include "bundle/file.h"
#include "bundle/validate.h"
#include "ops/layout.h"

namespace ps {
namespace {

long long ll(int64_t v) { return static_cast<long long>(v); }

bool before(Str a, Str b) {
  const uint32_t n = a.size < b.size ? a.size : b.size;
  const int order = n ? memcmp(a.data, b.data, n) : 0;
  return order < 0 || (order == 0 && a.size < b.size);
}

template <typename T>
ps_status unique_names(const Vec<T>& items, const char* what) {
  Vec<Str> names;
  Vec<int32_t> order;
  for (const T& item : items) {
    if (!names.push(item.name)) return fail(PS_OUT_OF_MEMORY, "metadata: out of memory");
  }
  const int64_t i = find_duplicate(names, &order);
  if (i == -2) return fail(PS_OUT_OF_MEMORY, "metadata: out of memory");
  return i < 0 ? PS_OK : fail(PS_INVALID_FILE, "%s[%lld].name: %.*s is used twice", what, ll(i), PS_STR(names[i]));
}

// Segments are in ascending order and page-aligned, from the end of the metadata to the end of the file.
ps_status validate_segments(const Graph& graph, int64_t begin, int64_t file_bytes) {
  int64_t end = begin, last = -1;
  for (int64_t i = 0; i < graph.segments.size(); ++i) {
    const Segment& s = graph.segments[i];
    if (s.offset < 0 || s.offset % kPageBytes) {
      return fail(PS_INVALID_FILE, "segments[%lld].offset: expected a multiple of %lld, got %lld", ll(i),
                  ll(kPageBytes), ll(s.offset));
    }
    if (s.offset < end) {
      return fail(PS_INVALID_FILE,
                  "segments[%lld].offset: expected at least %lld, where what precedes it ends, got %lld", ll(i),
                  ll(end), ll(s.offset));
    }
    int64_t stop;
    if (s.bytes < 0 || !checked_add(s.offset, s.bytes, &stop) || stop > file_bytes) {
      return fail(PS_INVALID_FILE,
                  "segments[%lld].bytes: expected a range within the file's %lld bytes, got %lld from %lld", ll(i),
                  ll(file_bytes), ll(s.bytes), ll(s.offset));
    }
    last = stop;
    end = round_up(stop, kPageBytes);
  }
  if (last >= 0 && last != file_bytes) {
    return fail(PS_INVALID_FILE, "segments: expected the last to end with the file at %lld, got %lld", ll(file_bytes),
                ll(last));
  }
  return PS_OK;
}

ps_status validate_weight(const Graph& graph, int64_t i) {
  const Weight& w = graph.weights[i];
  int64_t bytes, end;
  const ps_status status = checked_bytes(w.layout, w.rows, w.cols, &bytes);
  if (status != PS_OK) {
    return prefix(status == PS_UNSUPPORTED ? PS_UNSUPPORTED : PS_INVALID_FILE, "weights[%lld] (%.*s): ", ll(i),
                  PS_STR(w.name));
  }
  if (w.segment < 0 || w.segment >= graph.segments.size()) {
    return fail(PS_INVALID_FILE, "weights[%lld].segment: expected less than %lld, got %d", ll(i),
                ll(graph.segments.size()), w.segment);
  }
  if (w.bytes != bytes) {
    return fail(PS_INVALID_FILE, "weights[%lld].bytes: expected %lld for %s [%lld, %lld], got %lld", ll(i), ll(bytes),
                layout_name(w.layout), ll(w.rows), ll(w.cols), ll(w.bytes));
  }
  if (w.offset < 0 || w.offset % 64) {
    return fail(PS_INVALID_FILE, "weights[%lld].offset: expected a multiple of 64, got %lld", ll(i), ll(w.offset));
  }
  if (!checked_add(w.offset, w.bytes, &end) || end > graph.segments[w.segment].bytes) {
    return fail(PS_INVALID_FILE,
                "weights[%lld].offset: expected a range within the segment's %lld bytes, got %lld bytes from %lld",
                ll(i), ll(graph.segments[w.segment].bytes), ll(w.bytes), ll(w.offset));
  }
  // Fused vectors are concatenated in one row, and their parts count elements.
  const int64_t whole = w.rows == 1 && w.part_end - w.part_begin > 1 ? w.cols : w.rows;
  int64_t next = 0;
  for (int64_t p = w.part_begin; p < w.part_end; ++p) {
    const Part& part = graph.parts[p];
    if (part.row_start != next || part.num_rows < 1 || part.num_rows > whole - next) {
      return fail(PS_INVALID_FILE, "weights[%lld].parts[%lld]: expected rows from %lld within %lld, got %lld from %lld",
                  ll(i), ll(p - w.part_begin), ll(next), ll(whole), ll(part.num_rows), ll(part.row_start));
    }
    next += part.num_rows;
  }
  if (w.part_end > w.part_begin && next != whole) {
    return fail(PS_INVALID_FILE, "weights[%lld].parts: expected %lld rows in all, got %lld", ll(i), ll(whole),
                ll(next));
  }
  return PS_OK;
}

ps_status disjoint_weights(const Graph& graph) {
  Vec<int32_t> order;
  for (int64_t i = 0; i < graph.weights.size(); ++i) {
    if (!order.push(static_cast<int32_t>(i))) return fail(PS_OUT_OF_MEMORY, "metadata: out of memory");
  }
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const Weight &x = graph.weights[a], &y = graph.weights[b];
    return x.segment != y.segment ? x.segment < y.segment : x.offset != y.offset ? x.offset < y.offset : a < b;
  });
  for (int64_t i = 1; i < order.size(); ++i) {
    const Weight &x = graph.weights[order[i - 1]], &y = graph.weights[order[i]];
    if (x.segment == y.segment && x.offset + x.bytes > y.offset) {
      return fail(PS_INVALID_FILE, "weights[%d].offset: overlaps weights[%d]", order[i], order[i - 1]);
    }
  }
  return PS_OK;
}

}  // namespace

int64_t find_duplicate(const Vec<Str>& names, Vec<int32_t>* order) {
  if (!order->resize(names.size())) return -2;
  for (int64_t i = 0; i < names.size(); ++i) (*order)[i] = static_cast<int32_t>(i);
  std::sort(order->begin(), order->end(),
            [&](int32_t a, int32_t b) { return equal(names[a], names[b]) ? a < b : before(names[a], names[b]); });
  for (int64_t i = 1; i < order->size(); ++i) {
    if (equal(names[(*order)[i]], names[(*order)[i - 1]])) return (*order)[i];
  }
  return -1;
}

ps_status validate_storage(Graph* graph, int64_t data_begin, int64_t file_bytes) {
  PS_TRY(unique_names(graph->segments, "segments"));
  PS_TRY(unique_names(graph->weights, "weights"));
  PS_TRY(unique_names(graph->values, "values"));
  PS_TRY(unique_names(graph->states, "states"));
  PS_TRY(unique_names(graph->parts, "weights.parts"));
  PS_TRY(unique_names(graph->ops, "ops"));
  PS_TRY(validate_segments(*graph, data_begin, file_bytes));
  for (int64_t i = 0; i < graph->weights.size(); ++i) PS_TRY(validate_weight(*graph, i));
  return disjoint_weights(*graph);
}

}  // namespace ps
