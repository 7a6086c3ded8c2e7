// A GPU played by the host, below torch: the calls of CUDA's runtime, driver and cuBLAS that torch 2.11 and 2.12, built
// for CUDA 13, make when they train.
//
// Everything is done at once, in the order in which it is asked for. Device memory is the host's and limited as a
// GPU's; copies copy; kernels do nothing, so no number that comes out means anything. What is real is all that happens
// above: torch's dispatcher, autograd, allocator, graphs' pools and stream sanitizer, Triton's compiler, and the time
// the host takes.
//
// A GPU's refusals are played where they depend on the caller: memory that is used up, or registered twice; a capture
// that would wait, copy pageable memory or follow an event from outside. Calls that make a thread wait for the GPU are
// counted, by the thread that loaded this ("waits") and by all others ("waits elsewhere"); waits for an event are not.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#define API extern "C" __attribute__((visibility("default")))

namespace {

// ---- what is counted

const auto loader = std::this_thread::get_id();
std::mutex lock;  // of all below
std::map<std::string, long long> counts;

void count(const char* what, long long n = 1) {
  std::lock_guard held(lock);
  counts[what] += n;
}

cudaError_t waits() {
  count(std::this_thread::get_id() == loader ? "waits" : "waits elsewhere");
  return cudaSuccess;
}

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t refuse(cudaError_t error) { return last_error = error; }

// ---- memory

constexpr size_t PAGE = 4096, GRANULE = 2 << 20;

std::map<uintptr_t, size_t> on_device, pinned;             // ranges: start -> bytes
std::map<CUmemGenericAllocationHandle, size_t> physical;  // of the driver's interface, mapped or not
size_t used = 0;
std::atomic<unsigned long long> next_id{1};

size_t total() {
  static const size_t bytes = std::atof(std::getenv("PLAYED_GPU_GIB")) * (1ull << 30);
  return bytes;
}

size_t whole(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

bool within(const std::map<uintptr_t, size_t>& ranges, const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = ranges.upper_bound(address);
  return after != ranges.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

bool overlaps(const std::map<uintptr_t, size_t>& ranges, const void* pointer, size_t bytes) {
  const auto after = ranges.lower_bound(reinterpret_cast<uintptr_t>(pointer) + bytes);
  return after != ranges.begin() &&
         std::prev(after)->first + std::prev(after)->second > reinterpret_cast<uintptr_t>(pointer);
}

void* reserved(size_t bytes, int protection) {  // takes no memory until it is written
  void* const data = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

void fill(void* data, int value, size_t bytes) {
  if (value == 0 && bytes >= GRANULE) {  // whole pages are given back: they are zero when they are read
    const auto begin = whole(reinterpret_cast<uintptr_t>(data), PAGE);
    const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / PAGE * PAGE;
    if (!madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED)) {
      std::memset(data, 0, begin - reinterpret_cast<uintptr_t>(data));
      std::memset(reinterpret_cast<void*>(end), 0, reinterpret_cast<uintptr_t>(data) + bytes - end);
      return;
    }
  }
  std::memset(data, value, bytes);
}

// ---- streams, events, graphs

struct Stream {
  unsigned long long capture = 0;  // which, if it is captured
  size_t nodes = 0;
};

struct Event {
  bool timed;
  bool recorded = false;
  unsigned long long capture = 0;
  std::chrono::steady_clock::time_point at{};
};

struct Graph {
  size_t nodes;
};

Stream default_stream;

Stream& of(cudaStream_t stream) {
  return reinterpret_cast<uintptr_t>(stream) <= 2 ? default_stream : *reinterpret_cast<Stream*>(stream);
}

Event& of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

cudaError_t launch(cudaStream_t stream) {
  if (of(stream).capture) {
    ++of(stream).nodes;
  } else {
    count("kernels");
  }
  return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream, bool waiting) {
  bool to_device, from_device, pageable;
  {
    std::lock_guard held(lock);
    to_device = within(on_device, to), from_device = within(on_device, from);
    pageable = !(to_device || within(pinned, to)) || !(from_device || within(pinned, from));
  }
  if ((kind == cudaMemcpyHostToDevice && (!to_device || from_device)) ||
      (kind == cudaMemcpyDeviceToHost && (to_device || !from_device)))
    return refuse(cudaErrorInvalidValue);
  if (of(stream).capture) {
    if (pageable || waiting) return refuse(cudaErrorStreamCaptureUnsupported);
    ++of(stream).nodes;
    return cudaSuccess;
  }
  if (pageable || waiting) waits();
  count(to_device ? (from_device ? "copies on the device" : "copies to the device") : "copies to the host");
  static const bool still = std::getenv("PLAYED_GPU_STILL") != nullptr;  // for more memory than the host has
  if (!still || bytes <= PAGE) std::memmove(to, from, bytes);
  return cudaSuccess;
}

int attribute(int which) {  // an H100's
  static const std::map<int, int> known = {
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxBlockDimX, 1024},
      {cudaDevAttrMaxBlockDimY, 1024},
      {cudaDevAttrMaxBlockDimZ, 64},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxRegistersPerBlock, 65536},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrMemoryClockRate, 2619000},
      {cudaDevAttrGlobalMemoryBusWidth, 5120},
      {cudaDevAttrL2CacheSize, 52428800},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
  };
  const auto found = known.find(which);
  return found == known.end() ? 0 : found->second;
}

int succeed() { return 0; }

}  // namespace

// ---- asked by tests, through ctypes

// How often, or how many; forgets it.
API long long played_gpu_count(const char* what) {
  std::lock_guard held(lock);
  return std::exchange(counts[what], 0ll);
}

// ---- the device

API cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
API cudaError_t cudaGetDevice(int* n) { return *n = 0, cudaSuccess; }
API cudaError_t cudaSetDevice(int n) { return n ? refuse(cudaErrorInvalidDevice) : cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  *found = {};
  std::snprintf(found->name, sizeof found->name, "%s", std::getenv("PLAYED_GPU_NAME"));
  found->totalGlobalMem = total();
  found->major = 9;
  found->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  found->warpSize = 32;
  found->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  found->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  found->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  for (int axis = 0; axis < 3; ++axis) {
    found->maxThreadsDim[axis] = attribute(cudaDevAttrMaxBlockDimX + axis);
    found->maxGridSize[axis] = attribute(cudaDevAttrMaxGridDimX + axis);
  }
  found->unifiedAddressing = found->canMapHostMemory = found->concurrentKernels = found->cooperativeLaunch = 1;
  found->textureAlignment = 512;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  return *value = attribute(which), cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int) {
  return std::snprintf(id, size, "0000:00:00.0"), cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() { return waits(); }
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t) { return "an error of the GPU that the host plays"; }
API const char* cudaGetErrorString(cudaError_t error) {
  thread_local char text[64];
  std::snprintf(text, sizeof text, "%s, number %d", cudaGetErrorName(error), error);
  return text;
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- memory

API cudaError_t cudaMalloc(void** data, size_t bytes) {
  std::lock_guard held(lock);
  bytes = whole(bytes, GRANULE);
  if (used + bytes > total() || !(*data = reserved(bytes, PROT_READ | PROT_WRITE)))
    return refuse(cudaErrorMemoryAllocation);
  on_device[reinterpret_cast<uintptr_t>(*data)] = bytes;
  used += bytes;
  return cudaSuccess;
}
API cudaError_t cudaFree(void* data) {
  if (!data) return cudaSuccess;
  std::lock_guard held(lock);
  const auto found = on_device.find(reinterpret_cast<uintptr_t>(data));
  if (found == on_device.end()) return refuse(cudaErrorInvalidValue);
  munmap(data, found->second);
  used -= found->second;
  on_device.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  std::lock_guard held(lock);
  return *all = total(), *free = total() - used, cudaSuccess;
}
API cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned) {
  std::lock_guard held(lock);
  if (overlaps(pinned, data, bytes)) return refuse(cudaErrorHostMemoryAlreadyRegistered);
  pinned[reinterpret_cast<uintptr_t>(data)] = bytes;
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void* data) {
  std::lock_guard held(lock);
  return pinned.erase(reinterpret_cast<uintptr_t>(data)) ? cudaSuccess : refuse(cudaErrorHostMemoryNotRegistered);
}
API cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  if (!(*data = reserved(whole(bytes, PAGE), PROT_READ | PROT_WRITE))) return refuse(cudaErrorMemoryAllocation);
  return cudaHostRegister(*data, whole(bytes, PAGE), 0);
}
API cudaError_t cudaFreeHost(void* data) {
  std::lock_guard held(lock);
  const auto found = pinned.find(reinterpret_cast<uintptr_t>(data));
  if (found == pinned.end()) return refuse(cudaErrorInvalidValue);
  munmap(data, found->second);
  pinned.erase(found);
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* data) {
  std::lock_guard held(lock);
  *found = {};
  found->type = within(on_device, data) ? cudaMemoryTypeDevice
                : within(pinned, data)  ? cudaMemoryTypeHost
                                        : cudaMemoryTypeUnregistered;
  if (found->type != cudaMemoryTypeUnregistered) found->devicePointer = const_cast<void*>(data);
  if (found->type != cudaMemoryTypeDevice) found->hostPointer = const_cast<void*>(data);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, false);
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return copy(to, from, bytes, kind, nullptr, true);
}
API cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  if (!of(stream).capture) fill(data, value, bytes);
  return launch(stream);
}

// ---- streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return *stream = reinterpret_cast<cudaStream_t>(new Stream), cudaSuccess;
}
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete &of(stream), cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return of(stream).capture ? refuse(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return of(stream).capture ? refuse(cudaErrorStreamCaptureUnsupported) : waits();
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return of(stream).capture == of(event).capture ? cudaSuccess : refuse(cudaErrorStreamCaptureIsolation);
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(new Event{.timed = !(flags & cudaEventDisableTiming)});
  return cudaSuccess;
}
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete &of(event), cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  of(event).at = std::chrono::steady_clock::now();
  of(event).recorded = true;
  of(event).capture = of(stream).capture;
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  return of(event).capture ? refuse(cudaErrorCapturedEvent) : cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return of(event).capture ? refuse(cudaErrorCapturedEvent) : cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  for (const auto& event : {of(from), of(to)})
    if (!event.recorded || !event.timed) return refuse(cudaErrorInvalidResourceHandle);
  *ms = std::chrono::duration<float, std::milli>(of(to).at - of(from).at).count();
  return cudaSuccess;
}

// ---- graphs

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (&of(stream) == &default_stream) return refuse(cudaErrorStreamCaptureUnsupported);
  if (of(stream).capture) return refuse(cudaErrorIllegalState);
  of(stream) = {.capture = next_id++};
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (!of(stream).capture) return refuse(cudaErrorIllegalState);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{of(stream).nodes});
  of(stream).capture = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = of(stream).capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                         cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                         const cudaGraphEdgeData** edges, size_t* count) {
  if (id) *id = of(stream).capture;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  return std::swap(*mode, current), cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  count("graphs");
  count("kernels in graphs", reinterpret_cast<Graph*>(graph)->nodes);
  return cudaSuccess;
}
API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete reinterpret_cast<Graph*>(graph), cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  return delete reinterpret_cast<Graph*>(graph), cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return *count = reinterpret_cast<Graph*>(graph)->nodes, cudaSuccess;
}

// ---- kernels

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction() {}
API void __cudaRegisterVar() {}
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}

namespace {
thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} configured;
}  // namespace

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  return configured = {grid, block, shared, stream}, 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configured.grid, *block = configured.block, *shared = configured.shared;
  return *static_cast<void**>(stream) = configured.stream, cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(stream);
}
API cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(stream);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  return launch(config->stream);
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->numRegs = 32, found->maxThreadsPerBlock = 1024, found->binaryVersion = found->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  return *n = 2, cudaSuccess;
}

// ---- the driver, as torch's allocator and Triton ask it; what is not named here succeeds

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) *function = reinterpret_cast<void*>(succeed);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* n) { return *n = 1, CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  return *value = attribute(which), CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* context) { return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* value, CUlimit) { return *value = 0, CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult error, const char** text) {
  return *text = cudaGetErrorString(static_cast<cudaError_t>(error)), CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* module, const void*) {
  return *module = reinterpret_cast<CUmodule>(1), CUDA_SUCCESS;
}
API CUresult cuModuleLoad(CUmodule* module, const char*) { return cuModuleLoadData(module, nullptr); }
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char*) {
  return *function = reinterpret_cast<CUfunction>(1), CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS               ? 32
           : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                              : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) { return *n = 1, CUDA_SUCCESS; }
API CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction, void**, void**) {
  return static_cast<CUresult>(launch(config->hStream));
}
API CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            CUstream stream, void**, void**) {
  return static_cast<CUresult>(launch(stream));
}
API CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr data) {
  std::lock_guard held(lock);
  const auto* pointer = reinterpret_cast<const void*>(data);
  const bool known = within(on_device, pointer) || within(pinned, pointer);
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *static_cast<CUdeviceptr*>(value) = known ? data : 0;
  return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *bytes = GRANULE, CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr* data, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *data = reinterpret_cast<CUdeviceptr>(reserved(bytes, PROT_NONE));
  return *data ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr data, size_t bytes) {
  return munmap(reinterpret_cast<void*>(data), bytes), CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                         unsigned long long) {
  std::lock_guard held(lock);
  if (used + bytes > total()) return CUDA_ERROR_OUT_OF_MEMORY;
  used += physical[*handle = next_id++] = bytes;
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard held(lock);
  const auto found = physical.extract(handle);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  used -= found.mapped();
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr data, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  std::lock_guard held(lock);
  if (mprotect(reinterpret_cast<void*>(data), bytes, PROT_READ | PROT_WRITE)) return CUDA_ERROR_OUT_OF_MEMORY;
  on_device[data] = bytes;
  return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
API CUresult cuMemUnmap(CUdeviceptr data, size_t bytes) {
  std::lock_guard held(lock);
  on_device.erase(on_device.lower_bound(data), on_device.lower_bound(data + bytes));
  madvise(reinterpret_cast<void*>(data), bytes, MADV_DONTNEED);
  return mprotect(reinterpret_cast<void*>(data), bytes, PROT_NONE), CUDA_SUCCESS;
}

// ---- cuBLAS: a handle is the stream that it was given

#define PRODUCT(name) \
  API int name(cudaStream_t* handle) { return launch(*handle); }
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDotEx)

API int cublasCreate_v2(cudaStream_t** handle) { return *handle = new cudaStream_t(nullptr), 0; }
API int cublasDestroy_v2(cudaStream_t* handle) { return delete handle, 0; }
API int cublasSetStream_v2(cudaStream_t* handle, cudaStream_t stream) { return *handle = stream, 0; }
API int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
API int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
API int cublasSetMathMode() { return 0; }
API int cublasSetPointerMode_v2() { return 0; }
API int cublasSetWorkspace_v2() { return 0; }
API size_t cublasLtGetVersion() { return 130000; }
API int cublasLtMatmulDescCreate(void** made) { return *made = new char, 0; }
API int cublasLtMatmulDescDestroy(char* made) { return delete made, 0; }
API int cublasLtMatmulDescSetAttribute() { return 0; }
API int cublasLtMatmulPreferenceCreate(void** made) { return *made = new char, 0; }
API int cublasLtMatmulPreferenceDestroy(char* made) { return delete made, 0; }
API int cublasLtMatmulPreferenceSetAttribute() { return 0; }
API int cublasLtMatrixLayoutCreate(void** made) { return *made = new char, 0; }
API int cublasLtMatrixLayoutDestroy(char* made) { return delete made, 0; }
API int cublasLtMatrixLayoutSetAttribute() { return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* found) {
  return *found = 1, 0;
}
API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*,
                       void*, void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  return launch(stream);
}
