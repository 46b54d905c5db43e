// Launches the kernels of passes when XLA calls them, without Python. Python fills the tables of this file.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// The parts of version 0.1 of XLA's binary interface for custom calls that this file uses. Later versions of XLA accept
// it; their headers rename some of these types, so that none of them is included.
struct Error;
struct Context;

struct Extension {
  size_t nbytes;
  int kind;
  Extension* next;
};

struct Version {
  size_t nbytes;
  Extension* extensions;
  int major, minor;
};

struct Metadata {
  size_t nbytes;
  Version version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct NewError {
  size_t nbytes;
  Extension* extensions;
  const char* message;
  int code;
};

struct StreamOf {
  size_t nbytes;
  Extension* extensions;
  Context* context;
  void* stream;
};

struct Interface {
  size_t nbytes;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(NewError*);
  void (*others[3])();
  Error* (*stream_of)(StreamOf*);
};

struct Buffer {
  size_t nbytes;
  Extension* extensions;
  int dtype;
  void* data;
};

struct Buffers {
  size_t nbytes;
  Extension* extensions;
  int64_t size;
  int* kinds;
  Buffer** buffers;
};

struct Scalar {
  int dtype;
  int64_t* value;
};

struct Attributes {
  size_t nbytes;
  Extension* extensions;
  int64_t size;
  int* kinds;
  void** names;
  Scalar** values;
};

struct Frame {
  size_t nbytes;
  Extension* extensions;
  const Interface* interface;
  Context* context;
  int stage;
  Buffers arguments, results;
  Attributes attributes;
};

namespace {

constexpr int kMetadata = 1, kFailedPrecondition = 9, kInternal = 13;  // XLA's numbers of an extension, and of errors
constexpr int kMostDevices = 64, kMostBuffers = 256, kMostWords = 4096, kMostArguments = 64, kNumPasses = 1 << 14;

struct Kernel {
  void* function;
  const uint32_t* starts;  // the first word of each argument
  uint32_t grid, threads, shared_bytes, num_arguments;
};

// The word that is set to the address of a buffer of the call plus an offset.
struct Place {
  uint64_t word, buffer, offset;
};

// Memory in a buffer that is set to zero before the first kernel.
struct Zeros {
  uint64_t buffer, offset, nbytes;
};

}  // namespace

// A pass on one device. The buffers of a call are its arguments, then its results.
struct Pass {
  const uint64_t* words;
  const Place* places;
  const Kernel* kernels;
  const Zeros* zeros;
  uint32_t num_words, num_places, num_kernels, num_zeros, num_buffers;
};

// Functions of the CUDA driver, and one of Python, which binds a pass to a device or returns null.
struct Driver {
  int (*launch)(void* function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                unsigned shared_bytes, void* stream, void** arguments, void** extra);
  int (*set_zero)(uint64_t address, unsigned char value, size_t nbytes, void* stream);
  int (*device)(int* number);
  const Pass* (*bind)(int64_t call, int device);
};

namespace {

struct Entry {
  int64_t call;
  const Pass* passes[kMostDevices];
};

Driver driver;
Entry* entries[kNumPasses];

Entry* find(int64_t call) {
  for (uint64_t i = 0; i < kNumPasses; ++i) {
    Entry* entry = __atomic_load_n(&entries[(uint64_t(call) + i) % kNumPasses], __ATOMIC_ACQUIRE);
    if (entry == nullptr || entry->call == call) return entry;
  }
  return nullptr;
}

Error* failed(const Frame* frame, int code, const char* text, int64_t call, int detail) {
  char message[256];
  snprintf(message, sizeof message, text, (unsigned long long)call, detail);
  NewError error = {sizeof error, nullptr, message, code};
  return frame->interface->create_error(&error);
}

Error* launched(const Frame* frame, const Pass* pass, void* stream, int64_t call) {
  uint64_t buffers[kMostBuffers], words[kMostWords];
  int64_t num_arguments = frame->arguments.size;
  if (num_arguments + frame->results.size != pass->num_buffers)
    return failed(frame, kInternal, "cuflash: call %016llx got a wrong number of buffers (%d)", call,
                  int(num_arguments + frame->results.size));
  for (int64_t i = 0; i < num_arguments; ++i)
    buffers[i] = uint64_t(frame->arguments.buffers[i]->data);
  for (int64_t i = 0; i < frame->results.size; ++i)
    buffers[num_arguments + i] = uint64_t(frame->results.buffers[i]->data);
  int status = 0;
  for (uint32_t i = 0; i < pass->num_zeros && status == 0; ++i) {
    const Zeros& zeros = pass->zeros[i];
    status = driver.set_zero(buffers[zeros.buffer] + zeros.offset, 0, zeros.nbytes, stream);
  }
  memcpy(words, pass->words, sizeof(uint64_t) * pass->num_words);
  for (uint32_t i = 0; i < pass->num_places; ++i)
    words[pass->places[i].word] = buffers[pass->places[i].buffer] + pass->places[i].offset;
  for (uint32_t i = 0; i < pass->num_kernels && status == 0; ++i) {
    const Kernel& kernel = pass->kernels[i];
    void* arguments[kMostArguments];
    for (uint32_t j = 0; j < kernel.num_arguments; ++j) arguments[j] = words + kernel.starts[j];
    status = driver.launch(kernel.function, kernel.grid, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, stream,
                           arguments, nullptr);
  }
  if (status != 0)
    return failed(frame, kInternal, "cuflash: call %016llx did not start: error %d of the CUDA driver",
                  call, status);
  return nullptr;
}

}  // namespace

extern "C" {

void cuflash_set_driver(const Driver* functions) { driver = *functions; }

// Set the pass of a call on a device; null removes it. Python calls this function from one thread at a time. Returns 0
// if the pass exceeds the limits of this file, or if the table, whose entries are kept forever, is full.
int cuflash_set(int64_t call, int device, const Pass* pass) {
  if (device >= kMostDevices) return 0;
  if (pass != nullptr && (pass->num_words > kMostWords || pass->num_buffers > kMostBuffers)) return 0;
  for (uint32_t i = 0; pass != nullptr && i < pass->num_kernels; ++i)
    if (pass->kernels[i].num_arguments > kMostArguments) return 0;
  Entry* entry = find(call);
  if (entry != nullptr) {
    __atomic_store_n(&entry->passes[device], pass, __ATOMIC_RELEASE);
    return 1;
  }
  uint64_t i = 0;
  while (i < kNumPasses && entries[(uint64_t(call) + i) % kNumPasses] != nullptr) ++i;
  entry = i < kNumPasses ? static_cast<Entry*>(calloc(1, sizeof(Entry))) : nullptr;
  if (entry == nullptr) return 0;
  entry->call = call;
  entry->passes[device] = pass;
  __atomic_store_n(&entries[(uint64_t(call) + i) % kNumPasses], entry, __ATOMIC_RELEASE);
  return 1;
}

Error* cuflash_pass(Frame* frame) {
  for (Extension* each = frame->extensions; each != nullptr; each = each->next) {
    if (each->kind != kMetadata) continue;
    Metadata* metadata = reinterpret_cast<MetadataExtension*>(each)->metadata;
    metadata->version = {sizeof(Version), nullptr, 0, 1};
    metadata->traits = 0;
    return nullptr;
  }
  int64_t call = *frame->attributes.values[0]->value;  // "call", the only attribute
  int device = 0;
  if (driver.device == nullptr || driver.device(&device) != 0 || device < 0 || device >= kMostDevices)
    return failed(frame, kFailedPrecondition, "cuflash: call %016llx has no CUDA device (%d)", call,
                  device);
  const Entry* entry = find(call);
  const Pass* pass = entry == nullptr ? nullptr : __atomic_load_n(&entry->passes[device], __ATOMIC_ACQUIRE);
  if (pass == nullptr) pass = driver.bind(call, device);
  if (pass == nullptr)
    return failed(frame, kFailedPrecondition,
                  "cuflash: no launches %016llx on device %d in this process: import cuflash.jax and trace the "
                  "function here; a stored program does not hold kernels",
                  call, device);
  void* stream = nullptr;
#ifndef CUFLASH_WITHOUT_STREAM  // tests run the kernels on a platform that has none
  StreamOf request = {sizeof request, nullptr, frame->context, nullptr};
  if (Error* error = frame->interface->stream_of(&request)) return error;
  stream = request.stream;
#endif
  return launched(frame, pass, stream, call);
}

}  // extern "C"
