//! Compiles the protos with `protox`, in pure Rust: nobody needs a `protoc`.

use std::{env, path::PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["coxswain/v1/types.proto", "coxswain/v1/coordinator.proto", "coxswain/v1/control.proto"];
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?).join("coxswain_v1.bin");
    std::fs::write(&out, prost_bytes(&descriptors))?;
    tonic_prost_build::configure().codec_path("crate::codec::SmallBuffers").compile_fds(descriptors)?;
    Ok(())
}

fn prost_bytes(descriptors: &impl prost::Message) -> Vec<u8> {
    descriptors.encode_to_vec()
}
