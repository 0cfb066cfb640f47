// A stand-in for an NVIDIA GPU, for a PyTorch without CUDA: tensors on the device "cuda" whose numbers the CPU computes.
//
// It shows what a machine without a GPU cannot show otherwise: that tensors which meet are on one device, that what is
// meant for a GPU alone runs, that nothing is read before a copy on a side stream was waited for, and that no such copy
// touches memory of which the main stream may still make use. Copies on a side stream run when somebody waits for them,
// and no earlier. What it cannot show: the GPU's own kernels, and their speed and memory.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

using at::Tensor;
using std::optional;
using Lock = std::lock_guard<std::recursive_mutex>;

const c10::Device kGpu(c10::kCUDA, 0);

// When the main stream last made use of memory, in operations so far; how far a side stream has waited for it.

std::recursive_mutex lane;
std::unordered_map<const void*, int64_t> last_use;
int64_t num_operations = 0;
thread_local bool beside = false;  // a side stream is the current one
thread_local int64_t waited_for = 0;

void use(const void* memory) {
  if (beside) return;
  Lock lock(lane);
  last_use[memory] = ++num_operations;
}

void check_use(const Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  const auto found = last_use.find(tensor.storage().data());
  TORCH_CHECK(found == last_use.end() || found->second <= waited_for,
              "A copy on a side stream of memory that the main stream may still use");
}

// Memory: the host's, under the GPU's name; fresh memory holds NaN, and what is pinned is remembered.

struct GpuMemory final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(num_bytes);
    if (num_bytes) std::memset(data, 0xff, num_bytes);  // NaN: what is read before it is written shows
    use(data);  // by whoever had it before
    return {data, data, raw_deleter(), kGpu};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return [](void* data) { c10::GetCPUAllocator()->raw_deallocate(data); };
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

std::recursive_mutex pins;
std::set<const void*> pinned;

struct PinnedMemory final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(num_bytes);
    Lock lock(pins);
    pinned.insert(data);
    return {data, data, raw_deleter(), c10::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return [](void* data) {
      Lock lock(pins);
      pinned.erase(data);
      c10::GetCPUAllocator()->raw_deallocate(data);
    };
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

GpuMemory gpu_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(c10::kCUDA, &gpu_memory);

// What PyTorch asks of a device: one GPU, one stream, events that have always happened.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kGpu; }
  c10::Device getDevice() const override { return kGpu; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kGpu); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct GpuGenerator final : at::CPUGeneratorImpl {
  GpuGenerator() { pretend(kGpu); }
  void pretend(c10::Device device) { device_ = device; }
};

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {  // PyTorch looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(pins);
    return pinned.count(data);
  }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static Generator generator = make_generator<GpuGenerator>();
    return generator;
  }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<GpuGenerator>(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

namespace {

// The same memory under the other device's name.

Tensor renamed(const Tensor& tensor, c10::Device device, c10::DispatchKey key, at::Allocator* allocator) {
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr data(owner->mutable_data(), owner, [](void* one) { delete static_cast<c10::Storage*>(one); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(data), allocator, true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->_set_conj(tensor.is_conj());
  impl->_set_neg(tensor.is_neg());
  return result;
}

Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return renamed(tensor, c10::kCPU, c10::DispatchKey::CPU, c10::GetCPUAllocator());
}

Tensor on_gpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  use(tensor.storage().data());
  return renamed(tensor, kGpu, c10::DispatchKey::CUDA, &gpu_memory);
}

// Copies that a side stream was asked for, in order.

std::deque<std::pair<Tensor, Tensor>> waiting;  // to, from
int64_t num_asked = 0;

void run_until(int64_t mark) {
  Lock lock(lane);
  while (!waiting.empty() && num_asked - static_cast<int64_t>(waiting.size()) < mark) {
    auto [to, from] = waiting.front();
    waiting.pop_front();
    to.copy_(from);
  }
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Lock lock(lane);
  if (beside && non_blocking) {
    check_use(self);
    check_use(source);
    waiting.emplace_back(on_host(self), on_host(source));
    ++num_asked;
  } else {
    if (beside) run_until(num_asked);
    for (const auto& one : {self, source})
      if (one.is_cuda()) use(one.storage().data());
    on_host(self).copy_(on_host(source));
  }
  return self;
}

// Every other operation: the CPU's, on the same memory, after a look at where the arguments are.

struct Call {
  const std::string& name;
  std::vector<std::pair<Tensor, Tensor>> named{};  // the GPU's, the same on the host
  std::vector<GpuGenerator*> generators{};
  bool any_gpu = false, any_host = false, any_host_generator = false;

  Tensor argument(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      any_host |= tensor.is_cpu() && tensor.dim() > 0;  // numbers alone may come from the host
      return tensor;
    }
    any_gpu = true;
    use(tensor.storage().data());
    named.emplace_back(tensor, on_host(tensor));
    return named.back().second;
  }

  void argument(c10::IValue& value) {
    if (value.isTensor()) {
      value = argument(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (Tensor tensor : value.toTensorList()) tensors.push_back(argument(tensor));
      value = c10::List<Tensor>(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<optional<Tensor>> tensors;
      for (optional<Tensor> tensor : value.toOptionalTensorList())
        tensors.push_back(tensor ? optional<Tensor>(argument(*tensor)) : tensor);
      value = tensors;
    } else if (value.isGenerator() && value.toGenerator().defined()) {
      auto* found = dynamic_cast<GpuGenerator*>(value.toGenerator().unsafeGetGeneratorImpl());
      if (found) generators.push_back(found);
      any_gpu |= found != nullptr;
      any_host_generator |= found == nullptr;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      any_gpu = true;
      value = c10::Device(c10::kCPU);
    }
  }

  void check() const {
    const bool indexes = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
    TORCH_CHECK(!any_gpu || !any_host || indexes, "Expected all tensors to be on the same device: ", name);
    TORCH_CHECK(!any_gpu || !any_host_generator, "Expected a 'cuda' device type for generator: ", name);
  }

  Tensor result(const Tensor& tensor) const {
    for (const auto& [gpu, host] : named)
      if (host.is_same(tensor)) {
        auto* impl = gpu.unsafeGetTensorImpl();
        if (gpu.storage().data() != tensor.storage().data()) impl->set_storage_keep_dtype(on_gpu(tensor).storage());
        impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        return gpu;
      }
    return on_gpu(tensor);
  }

  void result(c10::IValue& value) const {
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors;
      for (Tensor tensor : value.toTensorList()) tensors.push_back(result(tensor));
      value = c10::List<Tensor>(tensors);
    }
  }
};

void by_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  if (beside) run_until(num_asked);
  const auto& schema = operation.schema();
  Call call{schema.name()};
  for (auto at = stack->end() - schema.arguments().size(); at != stack->end(); ++at) call.argument(*at);
  call.check();
  for (auto* generator : call.generators) generator->pretend(c10::kCPU);
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto* generator : call.generators) generator->pretend(kGpu);
  for (auto at = stack->end() - schema.returns().size(); at != stack->end(); ++at) call.result(*at);
}

// Where tensors come from, and how they look at each other's memory.

Tensor empty(c10::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device> device,
             optional<bool>, optional<at::MemoryFormat> format) {
  TORCH_CHECK(!device || device->index() <= 0, "CUDA error: invalid device ordinal");
  const c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(size, &gpu_memory, key, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, optional<at::ScalarType> dtype,
                     optional<at::Layout>, optional<at::Device>, optional<bool>) {
  const c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &gpu_memory, key, c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(source.device().is_cuda(), "Attempted to set the storage of a tensor on device \"cuda:0\" to another's");
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, source, 0, {count}, {1});
}

Tensor& set_like(Tensor& self, const Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, optional<at::MemoryFormat>) {
  const size_t num_bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.dtype().itemsize();
  const auto& storage = self.storage();
  if (num_bytes > storage.nbytes()) {
    auto data = gpu_memory.allocate(num_bytes);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(num_bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Scalar number(const Tensor& self) { return on_host(self).item(); }

int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool,
                        optional<double>, bool) {
  return 0;  // SDPBackend.MATH
}

void record_stream(Tensor&, c10::Stream) {}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("unfold", &at::native::unfold);
  library.impl("copy_", &copy_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("set_.source_Tensor", &set_like);
  library.impl("resize_", &resize_);
  library.impl("_local_scalar_dense", &number);
  library.impl("_fused_sdp_choice", &plain_attention);
  library.impl("record_stream", &record_stream);
  for (const char* name : {"convolution", "convolution_backward"})  // else kernels are looked for that are not there
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

extern "C" {
void stand_in_beside(bool is_beside, int64_t has_waited_for) {
  beside = is_beside;
  waited_for = has_waited_for;
}
int64_t stand_in_now() { return num_operations; }
int64_t stand_in_mark() { return num_asked; }
void stand_in_run_until(int64_t mark) { run_until(mark); }
}
