// A stand-in for CUDA in a build of PyTorch without it: two devices of type "cuda" whose memory is the host's.
//
// Knows what lucid asks of a device: tensors that live on it and never mix with others, operators that refuse what
// CUDA's refuse, and which calls make the host wait (reads, copies, nonzero, masks, equal, bincount; not unique).
// Refuses to know kernels: an operator is run by the CPU's own on CPU tensors over the same memory. A copy to the host
// that nobody waits for arrives late. No graphs, streams, profiler, generators or sparse tensors.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>

using namespace at;

constexpr DeviceIndex kDevices = 2;
using Guard = c10::impl::FakeGuardImpl<DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

namespace at {
// By these PyTorch asks whether there is CUDA. It asks once, so this library is loaded before PyTorch is.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  DeviceIndex deviceCount() const override { return kDevices; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(kCPU); }
  DeviceIndex getCurrentDevice() const override { return Guard::getDeviceIndex(); }
  void setCurrentDevice(DeviceIndex index) const override { Guard::setDeviceIndex(index); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
} // namespace at

namespace pretend {

// As torch.cuda.set_sync_debug_mode sets it.
enum SyncDebugMode { kSilent, kWarn, kError };
std::atomic<int64_t> sync_debug_mode{kSilent};

// What a copy to the host that nobody waited for will have brought at the next wait.
std::mutex of_late;
std::vector<std::pair<Tensor, Tensor>> late;

void arrive() {
  std::lock_guard<std::mutex> lock(of_late);
  for (auto& [to, values] : late) to.copy_(values);
  late.clear();
}

void host_waits(const char* why) {
  arrive();
  TORCH_CHECK(sync_debug_mode != kError, "called a synchronizing CUDA operation: ", why);
  if (sync_debug_mode == kWarn) TORCH_WARN("called a synchronizing CUDA operation: ", why);
}

struct Memory final : c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    TORCH_CHECK(memory || !bytes, "out of memory");
    return {memory, memory, &std::free, Device(DeviceType::CUDA, Guard::getDeviceIndex())};
  }
  DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} memory;

// The device that new memory is of.
struct On {
  explicit On(std::optional<Device> device) : before_(Guard::getDeviceIndex()) {
    if (device && device->has_index()) {
      TORCH_CHECK(device->index() < kDevices, "invalid device ordinal");
      Guard::setDeviceIndex(device->index());
    }
  }
  ~On() { Guard::setDeviceIndex(before_); }
  DeviceIndex before_;
};

constexpr DispatchKeySet kKeys(DispatchKey::CUDA);

ScalarType or_default(std::optional<ScalarType> dtype) {
  return dtype.value_or(c10::get_default_dtype_as_scalartype());
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  On on(device);
  return Tensor(at::detail::empty_generic(size, &memory, kKeys, or_default(dtype), format));
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  On on(device);
  return Tensor(at::detail::empty_strided_generic(size, stride, &memory, kKeys, or_default(dtype)));
}

// A CPU tensor over the same memory.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  void* data = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  Tensor same = at::from_blob(data, tensor.sizes(), tensor.strides(), TensorOptions().dtype(tensor.dtype()));
  same._set_neg(tensor.is_neg());
  if (tensor.is_complex()) same._set_conj(tensor.is_conj());
  return same;
}

Tensor on_device(const Tensor& tensor, Device device) {
  Tensor made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, device, {});
  if (tensor.numel()) on_host(made).copy_(tensor);
  return made;
}

const Tensor& resize_(const Tensor& tensor, IntArrayRef size, std::optional<MemoryFormat>) {
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  Storage storage = impl->storage();
  size_t bytes = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (storage.nbytes() < bytes) {
    On on(tensor.device());
    DataPtr larger = memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
  return tensor;
}

// The arguments of one call, as CPU tensors, with what each of them stands for.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : schema_(op.schema()), name_(op.operator_name()) {
    for (IValue& value : torch::jit::pop(*stack, schema_.arguments().size())) {
      const Argument& argument = schema_.arguments()[arguments_.size()];
      bool is_out = argument.kwarg_only() && argument.alias_info() && argument.alias_info()->isWrite();
      arguments_.push_back(converted(value, is_out));
    }
    TORCH_CHECK(!beside_ || !device_ || takes_host_indices(), "Expected all tensors to be on the same device, but ",
                name_, " got tensors on cuda and on cpu");
  }

  void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    for (IValue& argument : arguments_) torch::jit::push(*stack, argument);
    op.callBoxed(stack);
    for (auto& [host, device] : outs_) {
      if (device.sizes() != host.sizes()) device.resize_(host.sizes());
      if (host.numel()) on_host(device).copy_(host);
    }
    for (IValue& result : torch::jit::pop(*stack, schema_.returns().size())) torch::jit::push(*stack, returned(result));
  }

 private:
  bool takes_host_indices() const {
    return name_.name == "aten::index" || name_.name == "aten::index_put_" || name_.name == "aten::_index_put_impl_";
  }

  IValue converted(const IValue& value, bool is_out) {
    if (value.isDevice()) {
      if (value.toDevice().is_cuda() && value.toDevice().has_index()) device_ = value.toDevice();
      return Device(kCPU);
    }
    if (value.isTensor()) return host_of(value.toTensor(), is_out);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorList()) list.push_back(host_of(tensor, false));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor && tensor->scalar_type() == kBool) host_waits("an index that is a mask");
        list.push_back(tensor ? std::optional<Tensor>(host_of(*tensor, false)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  Tensor host_of(const Tensor& tensor, bool is_out) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      beside_ |= tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(!device_ || *device_ == tensor.device(), "Expected all tensors to be on the same device, but ", name_,
                " got tensors on ", *device_, " and ", tensor.device());
    device_ = tensor.device();
    for (auto& [host, device] : inputs_)
      if (device.is_same(tensor)) return host;
    // What is written from scratch may be resized, which memory of another's cannot.
    Tensor host = is_out ? at::empty({0}, tensor.options().device(kCPU)) : on_host(tensor);
    (is_out ? outs_ : inputs_).emplace_back(host, tensor);
    return host;
  }

  IValue returned(const IValue& value) const {
    if (value.isTensor()) return device_of(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorList()) list.push_back(device_of(tensor));
    return list;
  }

  Tensor device_of(const Tensor& tensor) const {
    for (auto* pairs : {&inputs_, &outs_})
      for (auto& [host, device] : *pairs)
        if (host.is_same(tensor)) return device;
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    return on_device(tensor, device_.value_or(Device(DeviceType::CUDA, Guard::getDeviceIndex())));
  }

  const FunctionSchema& schema_;
  OperatorName name_;
  std::vector<IValue> arguments_;
  std::vector<std::pair<Tensor, Tensor>> inputs_, outs_;
  std::optional<Device> device_;
  bool beside_ = false;
};

void by_the_cpu(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  Call call(op, stack);
  call.run(op, stack);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  bool crosses = to.is_cuda() != from.is_cuda() && from.numel();
  if (crosses && !non_blocking) host_waits("copy_ between host and device");
  if (crosses && non_blocking && !to.is_cuda()) {
    std::lock_guard<std::mutex> lock(of_late);
    late.emplace_back(to, on_host(from).clone());
    if (to.is_floating_point()) to.fill_(NAN);
  } else {
    on_host(to).copy_(on_host(from));
  }
  return to;
}

Scalar item(const Tensor& tensor) {
  host_waits("_local_scalar_dense");
  return at::_local_scalar_dense(on_host(tensor));
}

bool equal(const Tensor& one, const Tensor& other) {
  host_waits("equal");
  TORCH_CHECK(one.device() == other.device(), "Expected all tensors to be on the same device, but equal got others");
  return at::equal(on_host(one), on_host(other));
}

Tensor nonzero(const Tensor& tensor) {
  host_waits("nonzero");
  return on_device(at::nonzero(on_host(tensor)), tensor.device());
}

Tensor bincount(const Tensor& tensor, const std::optional<Tensor>& weights, SymInt least) {
  host_waits("bincount");
  std::optional<Tensor> of = weights ? std::optional<Tensor>(on_host(*weights)) : std::nullopt;
  return on_device(at::bincount(on_host(tensor), of, least.expect_int()), tensor.device());
}

// As CUDA's kernel: all on one device; a float64 is looked at through a float32.
void check_and_unscale_(TensorList gradients, Tensor& found, const Tensor& factor) {
  bool beyond_float32 = false;
  std::vector<Tensor> hosts;
  for (const Tensor& gradient : gradients) {
    TORCH_CHECK(gradient.device() == found.device() && gradient.device() == factor.device() && gradient.is_cuda(),
                "the gradients, found_inf and inv_scale must be on one CUDA device");
    TORCH_CHECK(gradient.layout() == kStrided, "one of scaled_grads was not a strided tensor.");
    hosts.push_back(on_host(gradient));
    beyond_float32 |= gradient.scalar_type() == kDouble && !hosts.back().to(kFloat).isfinite().all().item<bool>();
  }
  Tensor flag = on_host(found);
  at::_amp_foreach_non_finite_check_and_unscale_(hosts, flag, on_host(factor));
  if (beyond_float32) flag.fill_(1.0);
}

Tensor as_strided(const Tensor& tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

Tensor view(const Tensor& tensor, IntArrayRef size) { return at::native::view(tensor, size); }

Tensor reshape_alias(const Tensor& tensor, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

} // namespace pretend

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  c10::SetAllocator(DeviceType::CUDA, &pretend::memory);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&pretend::by_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", pretend::empty);
  library.impl("empty_strided", pretend::empty_strided);
  library.impl("resize_", pretend::resize_);
  library.impl("as_strided", pretend::as_strided);
  library.impl("view", pretend::view);
  library.impl("_reshape_alias", pretend::reshape_alias);
  library.impl("copy_", pretend::copy_);
  library.impl("_local_scalar_dense", pretend::item);
  library.impl("equal", pretend::equal);
  library.impl("nonzero", pretend::nonzero);
  library.impl("bincount", pretend::bincount);
  library.impl("_amp_foreach_non_finite_check_and_unscale_", pretend::check_and_unscale_);
}

TORCH_LIBRARY(pretend_cuda, library) {
  library.def("synchronize() -> ()", [] { pretend::arrive(); });
  library.def("set_sync_debug_mode(int mode) -> ()", [](int64_t mode) { pretend::sync_debug_mode = mode; });
}
