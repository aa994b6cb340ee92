// FlashInfer's planner behind one C function. With fake_runtime.cc it runs without a device.
#include <cstring>
#include <flashinfer/attention/scheduler.cuh>

using namespace flashinfer;

extern "C" {

// numbers: total_num_rows, batch_size, num_qo_heads, num_kv_heads, head_dim, page_size, enable_cuda_graph,
// window_left, fixed_split_size, disable_split_kv, uniform_q_len, fixed_uniform_q_len.
// Returns the length of the plan vector in `out`, or -1 with the reason in `message`.
int graphspec_prefill_plan(void* float_buffer, void* int_buffer, void* pinned_buffer, int* qo_indptr, int* kv_indptr,
                           const int64_t* sizes, const int64_t* numbers, int64_t* out, char* message) {
  try {
    PrefillPlanInfo info;
    auto status = PrefillPlan<int>(
        float_buffer, sizes[0], int_buffer, pinned_buffer, sizes[1], info, qo_indptr, kv_indptr, numbers[0], numbers[1],
        numbers[2], numbers[3], numbers[4], numbers[4], numbers[5], numbers[6], /*sizeof_dtype_o=*/2, numbers[7],
        numbers[8], numbers[9], /*num_colocated_ctas=*/0, numbers[10],
#ifdef FIXED_UNIFORM_Q_LEN
        numbers[11],
#endif
        /*stream=*/nullptr);
    if (status != cudaSuccess) throw std::runtime_error("the planner returned an error");
    auto vector = info.ToVector();
    if (vector.size() > 16) throw std::runtime_error("the plan vector has grown");
    memcpy(out, vector.data(), vector.size() * sizeof(int64_t));
    return vector.size();
  } catch (const std::exception& error) {
    strncpy(message, error.what(), 499);
    return -1;
  }
}
}
