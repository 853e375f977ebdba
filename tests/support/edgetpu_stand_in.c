/* A test double of libedgetpu: the C entry points that TFLite's load_delegate calls, and nothing of an Edge TPU.

   Its delegate takes every "edgetpu-custom-op" and copies input to output. The environment variable
   EDGETPU_STAND_IN chooses what goes wrong: none (the default), null, text, busy, crash, hang, old, crash-run, hang-run,
   crash-version.

   The layouts are those of TFLite's C API, as far as they are used here, on 64-bit hosts.
   Source: tensorflow/lite/core/c/common.h. */

#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Status; /* 0: ok, 1: error */
typedef struct { int size; int data[]; } IntArray;
typedef struct { IntArray *inputs, *outputs; } Node; /* and more */
typedef struct {
  int type;
  char *data;
  IntArray *dims;
  float scale;
  int32_t zero_point;
  int allocation;
  size_t bytes;
  void *more[8];
} Tensor;
typedef struct Context Context;
typedef struct {
  void *(*init)(Context *, const char *, size_t);
  void (*release)(Context *, void *);
  Status (*prepare)(Context *, Node *);
  Status (*invoke)(Context *, Node *);
  void *profiling;
  int32_t builtin_code;
  const char *custom_name;
  int version;
  void *newer[8]; /* what later versions read beyond: nothing */
} Registration;
typedef struct Delegate {
  void *data;
  Status (*prepare)(Context *, struct Delegate *);
  void *copy_from, *copy_to, *free_handle;
  int64_t flags;
  void *builder;
} Delegate;
struct Context {
  size_t tensors_size;
  Status (*plan)(Context *, IntArray **);
  Tensor *tensors;
  void *impl;
  void *resize;
  void (*report)(Context *, const char *, ...);
  void *add;
  Status (*node)(Context *, int, Node **, Registration **);
  Status (*replace)(Context *, Registration, const IntArray *, Delegate *);
};

static int wants(const char *what) {
  const char *found = getenv("EDGETPU_STAND_IN");
  return found && strcmp(found, what) == 0;
}

static void crash(void) {
  signal(SIGSEGV, SIG_DFL);
  raise(SIGSEGV);
}

static void *init(Context *context, const char *buffer, size_t length) { return context; }

static Status prepare(Context *context, Node *node) {
  if (wants("old")) {
    context->report(context, "Failed to prepare for TPU. Package requires runtime version (14), "
                             "which is newer than this runtime version (13).");
    return 1;
  }
  return 0;
}

static Status invoke(Context *context, Node *node) {
  Tensor *from = &context->tensors[node->inputs->data[0]], *to = &context->tensors[node->outputs->data[0]];
  if (wants("crash-run")) crash();
  if (wants("hang-run")) sleep(3600);
  if (from->bytes != to->bytes) return 1;
  memcpy(to->data, from->data, to->bytes);
  return 0;
}

static Status take(Context *context, Delegate *delegate) {
  IntArray *plan;
  if (context->plan(context, &plan)) return 1;
  IntArray *mine = calloc(1, sizeof(IntArray) + sizeof(int) * plan->size);
  for (int i = 0; i < plan->size; i++) {
    Node *node;
    Registration *registration;
    if (context->node(context, plan->data[i], &node, &registration)) return 1;
    if (registration->custom_name && strcmp(registration->custom_name, "edgetpu-custom-op") == 0)
      mine->data[mine->size++] = plan->data[i];
  }
  Registration registration = {.init = init, .prepare = prepare, .invoke = invoke, .custom_name = "StandIn", .version = 1};
  Status status = mine->size ? context->replace(context, registration, mine, delegate) : 0;
  free(mine);
  return status;
}

const char *edgetpu_version(void) {
  if (wants("crash-version")) crash();
  return "BuildLabel(stand-in), RuntimeVersion(14)";
}

Delegate *tflite_plugin_create_delegate(char **keys, char **values, size_t count, void (*report)(const char *)) {
  if (wants("crash")) crash();
  if (wants("hang")) sleep(3600);
  if (wants("text")) report("this is what it says");
  if (wants("busy")) report("Device or resource busy");
  if (wants("null") || wants("text") || wants("busy")) return NULL;
  Delegate *made = calloc(1, sizeof(Delegate));
  made->prepare = take;
  made->flags = 1; /* dynamic tensors are allowed; otherwise all operators are prepared before this one takes its own */
  return made;
}

void tflite_plugin_destroy_delegate(Delegate *delegate) { free(delegate); }
