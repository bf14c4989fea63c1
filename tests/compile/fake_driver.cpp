// A CUDA driver that launches nothing and remembers what it was asked.
#include <cstdint>
#include <cstring>
#include <vector>

struct Launch {
    const char* name;
    unsigned grid[3], block, shared, attributes;
    uint64_t stream, words[40];
};
struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned count;
};
static std::vector<Launch> launches;
static std::vector<const char*> names;
static int fail_next = 0, loads = 0, contexts_set = 0, shared_asked = 0;

extern "C" {
int cuInit(unsigned) { return 0; }
int cuGetErrorString(int code, const char** text) { *text = "an error of the fake driver"; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(uintptr_t)(100 + device); return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void**) { return 0; }
int cuCtxSetCurrent(void*) { ++contexts_set; return 0; }
int cuModuleLoadData(void** module, const void* image) {
    if (memcmp(image, "\x7f" "ELF", 4) != 0) return 200;
    *module = (void*)(uintptr_t)(++loads);
    return 0;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
    names.push_back(strdup(name));
    *function = (void*)names.size();
    return 0;
}
int cuFuncSetAttribute(void*, int attribute, int value) { if (attribute == 8) shared_asked = value; return 0; }
static int record(void* function, const unsigned* grid, unsigned block, unsigned shared, void* stream, void** params, unsigned attributes) {
    if (fail_next) { int code = fail_next; fail_next = 0; return code; }
    Launch made = {names[(uintptr_t)function - 1], {grid[0], grid[1], grid[2]}, block, shared, attributes, (uintptr_t)stream, {}};
    for (int i = 0; i < 40 && params[i]; ++i) {
        memcpy(&made.words[i], params[i], 8);
        if (i >= 3 && params[i] == params[i - 1] && params[i - 1] == params[i - 2] && params[i - 2] == params[i - 3]) break;
    }
    launches.push_back(made);
    return 0;
}
int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned, unsigned, unsigned shared, void* stream, void** params, void**) {
    const unsigned grid[3] = {x, y, z};
    return record(f, grid, bx, shared, stream, params, 0);
}
int cuLaunchKernelEx(const Config* c, void* f, void** params, void**) {
    return record(f, c->grid, c->block[0], c->shared, c->stream, params, c->count);
}
int cuGraphLaunch(void* graph, void* stream) { return graph == (void*)13 ? 700 : 0; }
// for the tests
int fake_launches() { return (int)launches.size(); }
const Launch* fake_launch(int k) { return &launches[k]; }
void fake_clear() { launches.clear(); }
void fake_fail(int code) { fail_next = code; }
int fake_loads() { return loads; }
int fake_contexts() { return contexts_set; }
int fake_shared() { return shared_asked; }
}
