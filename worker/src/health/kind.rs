//! Which kinds of processors come to the same bits: kernels choose between vector instructions, whose widths
//! decide how products are cut.

use std::hash::{DefaultHasher, Hash, Hasher};

use coxswain_nn::kernels::precision;

use crate::collective::Computes;

/// A number that is equal where results are, bit for bit; what ranks compare before they compare results.
/// The calling thread is one that computes for the run.
pub fn of(computes: Computes) -> u64 {
    let mut hasher = DefaultHasher::new();
    (computes == Computes::OnGpu).hash(&mut hasher);
    (computes != Computes::OnGpu && precision::rounds_on_host()).hash(&mut hasher);
    std::env::consts::ARCH.hash(&mut hasher);
    vector_instructions().hash(&mut hasher);
    hasher.finish()
}

/// The vector instructions that kernels here and in the `gemm` crate look for.
fn vector_instructions() -> Vec<bool> {
    #[cfg(target_arch = "x86_64")]
    return vec![
        is_x86_feature_detected!("avx2"),
        is_x86_feature_detected!("fma"),
        is_x86_feature_detected!("avx512f"),
        is_x86_feature_detected!("avx512bw"),
        is_x86_feature_detected!("avx512dq"),
        is_x86_feature_detected!("avx512vl"),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_another_kind_than_a_cpu_and_a_cpu_is_of_its_own() {
        assert_eq!(of(Computes::OnCpu), of(Computes::OnCpuForWantOfGpu));
        assert_ne!(of(Computes::OnCpu), of(Computes::OnGpu));
    }
}
