// The spans of a program: when each thread did what.
#include "program/spans.h"

#include "base/clock.h"
#include "program/program.h"

namespace ps {

ps_span label_span(const ps_program& p, int64_t step, int32_t thread) {
  const Step& s = p.bound.steps[step];
  const int64_t node = s.call - p.bound.calls.data();
  if (node == p.plan.nodes.size()) {  // rows are moved at the end of the step before it
    ps_span span = label_span(p, step - 1, thread);
    ++span.phase;
    return span;
  }
  int32_t phase = 0;
  while (step - phase > 0 && p.bound.steps[step - phase - 1].call == s.call) ++phase;
  return ps_span{static_cast<int32_t>(node), phase, thread, 0, 0, 0, 0};
}

// Each thread has a row of spans, and fills in the steps in which it took part.
void clear_spans(ps_program* p) {
  ps_span* span = p->spans.whole() + 1;
  for (int64_t i = p->context->pool.num_threads() * p->bound.steps.size(); i > 0; --i, ++span)
    span->arrive_ns = span->begin_ns = span->end_ns = 0;
}

// Moves the rows of threads that took part to the front.  A step from which a thread was absent has duration 0.
void gather_spans(ps_program* p, int64_t start_ns) {
  ps_span* const whole = p->spans.whole();
  whole->arrive_ns = whole->begin_ns = start_ns;
  whole->end_ns = now_ns();
  const int64_t num_steps = p->bound.steps.size();
  int64_t count = 0;
  for (int32_t t = 0; t < p->context->pool.num_threads(); ++t) {
    const ps_span* row = whole + 1 + t * num_steps;
    ps_span* out = whole + 1 + count * num_steps;
    int64_t last = start_ns, present = 0;
    for (int64_t s = 0; s < num_steps; ++s) {
      ps_span span = row[s];
      present += span.end_ns != 0;
      if (!span.end_ns) span.arrive_ns = span.begin_ns = span.end_ns = span.arrive_ns ? span.arrive_ns : last;
      last = span.end_ns;
      span.thread = t;
      out[s] = span;
    }
    count += present > 0;
  }
  p->spans.count = 1 + count * num_steps;
}

ps_status profile_program(ps_program* program, bool on) {
  program->spans.on = false;
  program->spans.count = 0;
  program->spans.memory.release();
  if (!on) return PS_OK;
  const int64_t threads = program->context->pool.num_threads(), steps = program->bound.steps.size();
  const int64_t bytes = (1 + threads * steps) * static_cast<int64_t>(sizeof(ps_span));
  if (!program->spans.memory.allocate(bytes))
    return fail(PS_OUT_OF_MEMORY, "profile: no memory for %lld bytes", static_cast<long long>(bytes));
  ps_span* span = program->spans.whole();
  *span++ = ps_span{-1, 0, 0, 0, 0, 0, 0};
  for (int64_t t = 0; t < threads; ++t) {
    for (int64_t s = 0; s < steps; ++s) *span++ = label_span(*program, s, static_cast<int32_t>(t));
  }
  program->spans.on = true;
  return PS_OK;
}

}  // namespace ps
