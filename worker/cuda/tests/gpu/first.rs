//! What a GPU is asked first (`cox selftest --first`).

use coxswain_cuda::NVIDIA;
use coxswain_worker::{device::Accelerator, selftest::Finding};

use crate::gpus;

#[test]
fn a_kernel_a_product_and_products_in_order_are_right() {
    if gpus("what a GPU is asked first").is_none() {
        return;
    }
    let found = NVIDIA.on_gpu().first(0);
    assert!(found.len() == 4 && !found.iter().any(Finding::failed), "{found:#?}");
    found.iter().for_each(|finding| println!("{}: {}", finding.what, finding.found));
}
