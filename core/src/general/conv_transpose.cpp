// Ops of general networks: conv_transpose.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_conv_transpose(const Spec*, AttrValue*, Spec*) {
  return fail(PS_UNSUPPORTED, "conv_transpose: not built yet");
}
Phases conv_transpose_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status conv_transpose_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
