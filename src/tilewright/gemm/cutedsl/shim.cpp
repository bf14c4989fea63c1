// The runtime that objects of the CuTe DSL call, over the CUDA driver alone: with it an object is a
// shared library that neither the DSL nor CUDA's runtime has to be installed for. The functions have
// the names and arguments the DSL's compiler gives them; numbers of attributes, and launch
// configurations, are the same in the driver's interface as in the runtime's.
#include <dlfcn.h>

#include <cstddef>

#define HIDDEN __attribute__((visibility("hidden")))
#define SHOWN extern "C" __attribute__((visibility("default")))

namespace {
struct Driver {
    int (*init)(unsigned);
    int (*load)(void**, const void*, void*, void**, unsigned, void*, void**, unsigned);
    int (*kernel)(void**, void*, const char*);
    int (*device)(int*);
    int (*attribute)(int*, int, int);
    int (*read)(int*, int, void*, int);
    int (*set)(int, int, void*, int);
    int (*launch)(const void*, void*, void**, void**);
} driver;
constexpr int NOT_LOADED = 3, NOT_FOUND = 500;
void* library = nullptr;

template <class F>
bool find(void* from, const char* name, F& into) {
    into = reinterpret_cast<F>(dlsym(from, name));
    return into != nullptr;
}
}  // namespace

SHOWN int tw_open(const char* path) {
    void* from = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // its names must not stand in for others'
    if (from == nullptr) return NOT_LOADED;
    bool found = find(from, "cuInit", driver.init) && find(from, "cuLibraryLoadData", driver.load) &&
                 find(from, "cuLibraryGetKernel", driver.kernel) &&
                 find(from, "cuCtxGetDevice", driver.device) &&
                 find(from, "cuDeviceGetAttribute", driver.attribute) &&
                 find(from, "cuKernelGetAttribute", driver.read) &&
                 find(from, "cuKernelSetAttribute", driver.set) &&
                 find(from, "cuLaunchKernelEx", driver.launch);
    return found ? driver.init(0) : NOT_FOUND;
}

extern "C" {
int tw_cuda_init(void**);
int tw_cuda_load_to_device(void**, int);

HIDDEN int _cudaLibraryLoadData(void** into, const void* code, void* o, void** ov, unsigned n,
                                void* l, void** lv, unsigned m) {
    return driver.load(into, code, o, ov, n, l, lv, m);
}
HIDDEN int _cudaLibraryGetKernel(void** into, void* from, const char* name) {
    return driver.kernel(into, from, name);
}
HIDDEN int _cudaGetDevice(int* into) { return driver.device(into); }
HIDDEN int _cudaDeviceGetAttribute(int* into, int which, int device) {
    return driver.attribute(into, which, device);
}
HIDDEN int _cuKernelGetAttribute(int* into, int which, void* kernel, int device) {
    return driver.read(into, which, kernel, device);
}
HIDDEN int _cudaKernelSetAttributeForDevice(void* kernel, int which, int value, int device) {
    return driver.set(which, value, kernel, device);
}
HIDDEN int _cudaFuncSetAttribute(void* kernel, int which, int value) {
    int device = 0;
    int code = driver.device(&device);
    return code != 0 ? code : driver.set(which, value, kernel, device);
}
HIDDEN int _cudaLaunchKernelEx(const void* config, void* kernel, void** arguments) {
    return driver.launch(config, kernel, arguments, nullptr);
}
}

// Once for a device, before the first launch on it.
SHOWN int tw_load(int device) {
    if (library == nullptr) {
        int code = tw_cuda_init(&library);
        if (code != 0) return code;
    }
    return tw_cuda_load_to_device(&library, device);
}
