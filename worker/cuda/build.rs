//! The library that answers under NVRTC's name (`src/nvrtc/stand_in.c`), for the binary to carry. Where there
//! is no CUDA it is empty.

use std::{env, fs, path::PathBuf, process::Command};

const SOURCE: &str = "src/nvrtc/stand_in.c";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo")).join("libnvrtc.so");
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return fs::write(out, "").expect("the build folder can be written");
    }
    let mut compiler: Command = cc::Build::new().get_compiler().to_command();
    compiler.args(["-shared", "-fPIC", "-O2", "-s", "-nostdlib", "-Wl,-soname,libnvrtc.so", "-o"]);
    let built = compiler.arg(&out).arg(SOURCE).status();
    assert!(built.is_ok_and(|ended| ended.success()), "the C compiler refuses {SOURCE}: {compiler:?}");
}
