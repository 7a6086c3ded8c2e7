// A device whose memory is not the host's, as far as torch can tell: its extension point PrivateUse1, played by the
// CPU.
//
// What a GPU would refuse is refused: an operation on tensors of two devices. What would make a host thread wait for a
// GPU is counted, unless the thread that loaded this does it: a number that is read, a copy that is not asynchronous.
// Attention is one operation and keeps what a GPU's flash attention keeps.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

using at::Tensor;
using std::optional;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);

// ---- what is counted

const auto loader = std::this_thread::get_id();
std::atomic<long> waits = 0;
thread_local int within = 0;  // operations that use others to do their work

struct Within {
  Within() { ++within; }
  ~Within() { --within; }
};

void wait_for_device() {
  if (!within && std::this_thread::get_id() != loader) ++waits;
}

// ---- the device, its memory, and what autograd asks of it

const c10::Stream STREAM(c10::Stream::DEFAULT, DEVICE);  // on which all is done at once

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return STREAM; }
  c10::Stream getDefaultStream(c10::Device) const override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const override { return STREAM; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nullptr;
    TORCH_CHECK(!nbytes || !posix_memalign(&data, 512, nbytes), "out of memory");
    if (nbytes) std::memset(data, 0xFF, nbytes);  // NaN: memory comes with what was there
    return {data, data, &std::free, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};
const bool registered = [] { at::RegisterPrivateUse1HooksInterface(new Hooks); return true; }();

// ---- operations on memory

Tensor as_cpu(const Tensor& t) {  // the same memory
  return t.is_cpu() ? t : at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::SymIntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
             optional<bool>, optional<at::MemoryFormat> format) {
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, type, format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<at::Device>, optional<bool>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  return at::detail::empty_strided_generic(sizes, strides, &memory, KEYS, c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, storage, 0, {count}, {});
}

Tensor& set_view(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                 c10::SymIntArrayRef stride) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  return at::native::set_storage_cpu_(self, storage, offset.expect_int(), sizes, strides);
}

Tensor view(const Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshaped(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.device() != to.device()) {
    // a GPU copies neither numbers of another type nor scattered ones without a temporary, which is not pinned
    const bool plain = from.scalar_type() == to.scalar_type() && from.is_contiguous() && to.is_contiguous();
    if (!non_blocking || !plain) wait_for_device();
  }
  as_cpu(to).copy_(as_cpu(from));
  return to;
}

Tensor copy_result(const Tensor& from, const Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_impl_cpu_(to.unsafeGetTensorImpl(), from.sizes(), {});
  as_cpu(to).copy_(as_cpu(from));
  return to;
}

at::Scalar read(const Tensor& t) {
  wait_for_device();
  return as_cpu(t).item();
}

// ---- all others: on the CPU, if all operands lie on one device; numbers may lie on the host

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Within others;
  optional<c10::Device> device;
  auto check = [&](const Tensor& t) {
    if (!t.defined() || (t.is_cpu() && t.dim() == 0)) return;
    TORCH_CHECK(!device || *device == t.device(), op.schema().name(), " of tensors on ", *device, " and ", t.device());
    device = t.device();
  };
  for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensor()) check(argument.toTensor());
    if (argument.isTensorList())
      for (const auto& t : argument.toTensorVector()) check(t);
  }
  at::native::cpu_fallback(op, stack, false, c10::DispatchKey::CPU);
}

// ---- attention

int64_t choice(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool, optional<double>,
               bool) {
  return static_cast<int64_t>(sdp::SDPBackend::overrideable);
}

Tensor repeated(const Tensor& shared, const Tensor& q) {
  return as_cpu(shared).repeat_interleave(q.size(1) / shared.size(1), 1);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const optional<Tensor>&, double, bool causal, bool,
    optional<double> scale) {
  Within others;
  for (const auto* t : {&q, &k, &v}) TORCH_CHECK(t->device() == DEVICE, "attention on two devices");
  auto [y, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(as_cpu(q), repeated(k, q), repeated(v, q), 0.0,
                                                                      causal, {}, scale);
  auto on_device = [](const Tensor& t) { return t.transpose(1, 2).contiguous().to(DEVICE).transpose(1, 2); };
  auto random = at::zeros({2}, at::TensorOptions().dtype(at::kLong).device(DEVICE));
  return {on_device(y), on_device(log_sum), {}, {}, q.size(2), k.size(2), random, at::zeros({}, at::kLong), {}};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dy, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&, std::array<bool, 4>,
    const Tensor& y, const Tensor& log_sum, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double, bool causal,
    const Tensor&, const Tensor&, optional<double> scale) {
  Within others;
  for (const auto* t : {&dy, &q, &k, &v, &y, &log_sum})
    TORCH_CHECK(t->device() == DEVICE, "attention on two devices");
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      as_cpu(dy), as_cpu(q), repeated(k, q), repeated(v, q), as_cpu(y), as_cpu(log_sum), 0.0, causal, {}, scale);
  auto shared = [&](const Tensor& t) { return t.unflatten(1, {k.size(1), -1}).sum(2).to(DEVICE); };
  return {dq.to(DEVICE), shared(dk), shared(dv), {}};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshaped);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_view);
  m.impl("_copy_from", &copy);
  m.impl("_copy_from_and_resize", &copy_result);
  m.impl("_local_scalar_dense", &read);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choice)
}

extern "C" long waits_since_last_asked() { return waits.exchange(0); }
