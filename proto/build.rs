//! Compiles the protos with `protox`, in pure Rust: nobody needs a `protoc`.

use std::{env, path::PathBuf};

/// Messages that programs are shown under the names of their fields.
const SHOWN: [&str; 10] = [
    "CacheChanged",
    "CacheDrift",
    "CacheDriftRecord",
    "CacheGenerationRecord",
    "Failure",
    "HardwareFaults",
    "LeavingNode",
    "MembershipChanged",
    "SampleRange",
    "StepTimes",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["coxswain/v1/types.proto", "coxswain/v1/coordinator.proto", "coxswain/v1/control.proto"];
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    let out = PathBuf::from(env::var("OUT_DIR")?).join("coxswain_v1.bin");
    std::fs::write(&out, prost_bytes(&descriptors))?;
    let mut builder = tonic_prost_build::configure().codec_path("crate::codec::SmallBuffers");
    for message in SHOWN {
        builder = builder.message_attribute(message, "#[derive(serde::Serialize)]");
    }
    builder.compile_fds(descriptors)?;
    Ok(())
}

fn prost_bytes(descriptors: &impl prost::Message) -> Vec<u8> {
    descriptors.encode_to_vec()
}
