//! cubek's matrix products, kernel by kernel: which of them are right for which matrices.
//!
//! ```text
//! matrices     shapes and layouts, in memory that is NaN around them and between their rows
//! strategies   the kernels, and what each is used for
//! library      cuBLASLt: the same matrices, and products between other work
//! refused      kernels that a compiler refuses
//! ```
//!
//! The autotuner chooses by the clock among kernels of which some are wrong, and passes over those that
//! cannot be launched in silence. Here each is launched by name. `COXSWAIN_PRODUCTS=tma,mma_multi` keeps to
//! kernels with such names.

mod library;
mod matrices;
mod refused;
mod strategies;

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use burn_cuda::CudaDevice;
use cubecl::{Runtime, client::ComputeClient, cuda::CudaRuntime};
use cubek::{
    matmul::{
        definition::{MatmulElems, MatmulGlobalElems},
        launch::launch_ref,
    },
    std::InputBinding,
};

use self::{
    matrices::{Case, Number, PlacedMatrices, cases, is_right, product},
    strategies::{Kernel, Use, kernels},
};

use crate::gpus;

/// What came of one product.
#[derive(Clone, Debug, PartialEq)]
enum Outcome {
    Right,
    /// Before the launch, as the autotuner and ours expect it.
    Refused,
    /// After a launch that seemed to succeed.
    Failed(String),
    Wrong(String),
}

fn run(client: &ComputeClient<CudaRuntime>, kernel: &Kernel, case: &Case, number: Number) -> Outcome {
    let (x, w) = (PlacedMatrices::new(&case.x, number, 1), PlacedMatrices::new(&case.w, number, 2));
    let expected = product(&x, &w);
    let out = PlacedMatrices::nothing(&case.out(), Number::Float);
    let [x, w, out] = [&x, &w, &out].map(|matrix| matrix.upload(client));
    let place = number.place();
    let types = MatmulGlobalElems { lhs: place, rhs: place, out: Number::Float.place() };
    let launched = catch_unwind(AssertUnwindSafe(|| {
        let sides = [&x, &w].map(|side| InputBinding::new(side.binding(), place));
        let [lhs, rhs] = sides;
        launch_ref(&kernel.strategy, client, lhs, rhs, out.binding(), &mut MatmulElems::from_globals(&types))
    }));
    match launched {
        Err(_) => return Outcome::Failed("panics".into()),
        Ok(Err(_)) => return Outcome::Refused,
        Ok(Ok(())) => (),
    }
    match out.read(client) {
        Err(why) => Outcome::Failed(why),
        Ok(found) => match is_right(&found, &expected, case.x.columns, kernel.tolerance(number)) {
            Ok(()) => Outcome::Right,
            Err(why) => Outcome::Wrong(why),
        },
    }
}

fn is_asked_for(kernel: &Kernel) -> bool {
    let asked = std::env::var("COXSWAIN_PRODUCTS").unwrap_or_default();
    asked.is_empty() || asked.split(',').any(|part| kernel.name.contains(part))
}

/// `kernels::cube::product` launches some kernels whatever the inner dimension, and lets the autotuner choose
/// where it is a multiple of 256, or of 512 for vectors.
fn is_used(kernel: &Kernel, case: &Case) -> bool {
    let (inner, vector) = (case.x.columns, case.x.rows == 1 || case.w.columns == 1);
    let tuned = inner.is_multiple_of(if vector { 512 } else { 256 });
    match kernel.usage {
        Use::Any => true,
        Use::Tuned => tuned,
        Use::TunedForVectors => tuned && vector,
    }
}

/// Every kernel of some use with every case that it is used for: what was not right.
fn all_wrong() -> Vec<String> {
    let client = CudaRuntime::client(&CudaDevice::new(0));
    let mut wrong = Vec::new();
    let cases = cases();
    let kernels: Vec<Kernel> = kernels().into_iter().filter(is_asked_for).collect();
    assert!(!kernels.is_empty(), "no kernel has a name as COXSWAIN_PRODUCTS asks for");
    for kernel in &kernels {
        for number in [Number::Bf16, Number::Float] {
            let mut counts = BTreeMap::new();
            for case in cases.iter().filter(|case| is_used(kernel, case)) {
                let outcome = run(&client, kernel, case, number);
                let (kind, message) = match &outcome {
                    Outcome::Right => ("right", None),
                    Outcome::Refused => ("refused", None),
                    Outcome::Failed(why) => ("failed", Some(why)),
                    Outcome::Wrong(why) => ("wrong", Some(why)),
                };
                *counts.entry(kind).or_insert(0) += 1;
                // The autotuner hears of a kernel that fails late. One that is launched by name has to say so
                // at once.
                let passed_over = kind == "failed" && kernel.usage != Use::Any;
                if let Some(why) = message.filter(|_| !passed_over) {
                    println!("{kind}: {} {number:?} {case}: {why}", kernel.name);
                    wrong.push(format!("{} {number:?} {case}", kernel.name));
                }
            }
            if !counts.is_empty() {
                println!("{} {number:?}: {counts:?}", kernel.name);
            }
        }
    }
    wrong
}

#[test]
fn products_are_right_with_every_kernel_that_may_compute_them() {
    if gpus("products").is_none() {
        return;
    }
    let wrong = all_wrong();
    assert!(wrong.is_empty(), "{} products are wrong: {wrong:#?}", wrong.len());
    // A kernel that faults ends all that come after it, and these would be passed over.
    let client = CudaRuntime::client(&CudaDevice::new(0));
    let last = run(&client, &kernels()[0], &cases()[0], Number::Float);
    assert_eq!(
        last,
        Outcome::Right,
        "the GPU computes no more: one of the kernels that were passed over has broken it"
    );
}
