// Of tests/test_engine_stops.py.
struct Node {
  int value;
  Node *next;
};
extern "C" __global__ void lists(const int *in, int *out, int n) {
  Node *head = nullptr;
  for (int i = 0; i < n; ++i) {
    Node *node = (Node *)malloc(sizeof(Node));
    node->value = in[threadIdx.x * n + i];
    node->next = head;
    head = node;
  }
  int *copy = new int[n];
  int i = 0, sum = 0;
  while (head) {
    Node *next = head->next;
    copy[i++] = head->value;
    free(head);
    head = next;
  }
  for (i = 0; i < n; ++i) sum = sum * 3 + copy[i];
  delete[] copy;
  free(nullptr);
  out[threadIdx.x] = sum;
}
__device__ int *kept;
extern "C" __global__ void greedy(int *out, size_t bytes) {
  kept = (int *)malloc(bytes);
  out[0] = kept == nullptr;
}
extern "C" __global__ void keep(int value) {
  kept = new int;
  *kept = value;
}
extern "C" __global__ void take(int *out) {
  out[0] = *kept;
  delete kept;
}
