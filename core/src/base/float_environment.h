// The floating-point environment: rounding mode, subnormal numbers and exception masks.
//
// Results must not depend on the settings of the calling thread.  Every API function that computes holds a
// FloatEnvironment, and a pool's threads set their own when they start.
#ifndef PENSTOCK_BASE_FLOAT_ENVIRONMENT_H
#define PENSTOCK_BASE_FLOAT_ENVIRONMENT_H

#include <stdint.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <fenv.h>
#endif

namespace ps {

// The calling thread's registers.  The default rounds to nearest, keeps subnormal numbers and masks all exceptions.
#if defined(__x86_64__)
struct FloatRegisters { uint32_t mxcsr; };
inline FloatRegisters read_float_registers() {
  FloatRegisters found;
  __asm__ volatile("stmxcsr %0" : "=m"(found.mxcsr) : : "memory");
  return found;
}
inline void write_float_registers(const FloatRegisters& wanted) {
  __asm__ volatile("ldmxcsr %0" : : "m"(wanted.mxcsr) : "memory");
}
constexpr FloatRegisters kDefaultFloatRegisters = {0x1f80};
constexpr uint32_t kExceptionFlags = 0x3f;  // the flags of past exceptions; they do not affect results
inline bool is_default(const FloatRegisters& found) {
  return (found.mxcsr & ~kExceptionFlags) == kDefaultFloatRegisters.mxcsr;
}
inline bool equal(const FloatRegisters& a, const FloatRegisters& b) { return a.mxcsr == b.mxcsr; }
#elif defined(__aarch64__)
struct FloatRegisters {
  uint64_t fpcr, fpsr;  // control, exception flags
};
inline FloatRegisters read_float_registers() {
  FloatRegisters found;
  __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(found.fpcr), "=r"(found.fpsr) : : "memory");
  return found;
}
inline void write_float_registers(const FloatRegisters& wanted) {
  __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(wanted.fpcr), "r"(wanted.fpsr) : "memory");
}
constexpr FloatRegisters kDefaultFloatRegisters = {0, 0};
inline bool is_default(const FloatRegisters& found) { return found.fpcr == kDefaultFloatRegisters.fpcr; }
inline bool equal(const FloatRegisters& a, const FloatRegisters& b) { return a.fpcr == b.fpcr && a.fpsr == b.fpsr; }
#else  // the C library knows the registers of other processors, but is slower
struct FloatRegisters { fenv_t environment; };
inline FloatRegisters read_float_registers() {
  FloatRegisters found;
  fegetenv(&found.environment);
  return found;
}
inline void write_float_registers(const FloatRegisters& wanted) { fesetenv(&wanted.environment); }
inline bool is_default(const FloatRegisters&) { return false; }
inline bool equal(const FloatRegisters&, const FloatRegisters&) { return false; }
#endif

// Sets the default if the environment differs; writing costs more than reading.
inline void set_default_float_environment(const FloatRegisters& found = read_float_registers()) {
  if (is_default(found)) return;
#if defined(__x86_64__) || defined(__aarch64__)
  write_float_registers(kDefaultFloatRegisters);
#else
  fesetenv(FE_DFL_ENV);
#endif
}

// Sets the default environment for its lifetime, then restores the caller's, including exception flags.
class FloatEnvironment {
 public:
  FloatEnvironment() : saved_(read_float_registers()) { set_default_float_environment(saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
  ~FloatEnvironment() {
    if (!equal(read_float_registers(), saved_)) write_float_registers(saved_);
  }

 private:
  const FloatRegisters saved_;
};

}  // namespace ps

#endif
