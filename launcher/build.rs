//! What `cox --version` says of a build beside its version: features, profile, processor.

use std::{env, path::Path};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let variable = |name| env::var(name).unwrap_or_default();
    let features = match env::var_os("CARGO_FEATURE_CUDA") {
        Some(_) => "features: cuda",
        None => "features: none, --features cuda brings NVIDIA GPUs",
    };
    // target/[triple/]PROFILE/build/PACKAGE/out: `PROFILE` itself only says whether it inherits from release.
    let out = variable("OUT_DIR");
    let profile = Path::new(&out).ancestors().nth(3).and_then(Path::file_name).unwrap_or_default();
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    let cpu = flags.split('\u{1f}').rev().find_map(|flag| Some(flag.split_once("target-cpu=")?.1));
    let (target, cpu) = (variable("TARGET"), cpu.unwrap_or("generic"));
    println!("cargo:rustc-env=COX_BUILT={features}; profile: {}; {target}, cpu: {cpu}", profile.display());
}
