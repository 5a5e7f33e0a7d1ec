//! The libraries that answer under the names of NVRTC and of the driver (`src/nvrtc/stand_in.c`,
//! `src/streams/stand_in.c`), for the binary to carry. Where there is no CUDA they are empty.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

const NVRTC: &str = "src/nvrtc/stand_in.c";
const DRIVER: &str = "src/streams/stand_in.c";

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let [nvrtc, second_name] = ["libnvrtc.so", "libcuda.so"].map(|name| out.join(name));
    if env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return [nvrtc, second_name]
            .iter()
            .for_each(|file| fs::write(file, "").expect("the folder can be written"));
    }
    build(Path::new(NVRTC), &nvrtc, &[]);
    // The driver is not here: what needs it is linked to an empty library of its name.
    let [nothing, driver] = ["nothing.c", "libcuda.so.1"].map(|name| out.join(name));
    fs::write(&nothing, "").expect("the folder can be written");
    build(&nothing, &driver, &[]);
    build(Path::new(DRIVER), &second_name, &[Path::new("-Wl,--no-as-needed"), &driver]);
}

/// A library of this source, under its file's name.
fn build(source: &Path, library: &Path, more: &[&Path]) {
    println!("cargo::rerun-if-changed={}", source.display());
    let name = library.file_name().expect("a file").to_string_lossy();
    let mut compiler: Command = cc::Build::new().get_compiler().to_command();
    compiler.args(["-shared", "-fPIC", "-O2", "-s", "-nostdlib"]).arg(format!("-Wl,-soname,{name}"));
    let built = compiler.arg("-o").arg(library).arg(source).args(more).status();
    assert!(
        built.is_ok_and(|ended| ended.success()),
        "the C compiler refuses {}: {compiler:?}",
        source.display()
    );
}
