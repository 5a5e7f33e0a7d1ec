//! Compiled kernels, kept between processes: a first step compiles hundreds, and a worker that is started
//! again should not.
//!
//! cubecl knows a kernel again by its name, its settings and its arguments, not by what it computes: what
//! was compiled of a kernel that was edited since would run in its place. So kernels are kept here, by the
//! text of their CUDA C++, the architecture and the compiler, whichever program asks
//! ([`nvrtc`](crate::nvrtc)):
//!
//! ```text
//! kernels/nvrtc-13.0/sm_90a-3f0a9c...cu   the text of a kernel
//! kernels/nvrtc-13.0/sm_90a-3f0a9c...ptx  what that compiler made of it for that architecture
//! ```
//!
//! Kernels may come compiled, as machine code that `worker/cuda/gpu/kernels.py` has made elsewhere of such
//! texts: `COX_KERNELS` names the folder. What is not among them is compiled here, and a line says so once.
//!
//! What it does not do: keep what the autotuner has measured. That names a kernel, and no bits of it.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    process,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::SystemTime,
};

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};

use coxswain_worker::device::Version;

use crate::clock;

/// Kernels that stay, of one compiler: those that were used last. A run asks for some 400.
const MOST: usize = 8192;
/// Names the folder of kernels that came compiled.
const VARIABLE: &str = "COX_KERNELS";
/// Says in that folder by which CUDA they were compiled, and how many.
const MADE: &str = "compiled";

/// Where kernels of this process come from, in words, without what was compiled here.
static SOURCE: OnceLock<String> = OnceLock::new();
/// Kernels that this process has compiled.
static HERE: AtomicUsize = AtomicUsize::new(0);

/// Where compiled kernels lie; not where a `cubecl.toml` has cubecl keep them itself. Before anything else
/// asks cubecl: its configuration is read once.
pub fn place() -> Option<PathBuf> {
    let config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    let place = match config.compilation.cache {
        None => Some(CacheConfig::Target.root().join("kernels")),
        Some(_) => None,
    };
    CubeClRuntimeConfig::set(config);
    place
}

/// Where kernels of this process come from, in words: "377 came compiled by CUDA 13.0, 0 compiled here".
pub fn told() -> String {
    let source = SOURCE.get().map_or("not cached", String::as_str);
    format!("{source}, {} compiled here", HERE.load(Ordering::Relaxed))
}

/// In words what came compiled, or why it is of no use.
fn made(shipped: &Path, driver: Version) -> Result<String, String> {
    let made = fs::read_to_string(shipped.join(MADE))
        .map_err(|why| format!("the precompiled kernels' file {MADE:?} cannot be read: {why}"))?;
    let (cuda, count) =
        made.trim().split_once(' ').ok_or("the precompiled kernels do not name a CUDA version")?;
    let major: u32 = cuda.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(u32::MAX);
    if major > driver.major {
        return Err(format!("precompiled kernels are for CUDA {cuda}, but this driver is for {driver}"));
    }
    Ok(format!("{count} precompiled by CUDA {cuda}"))
}

/// What a kernel is known again by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// The key of a kernel's text and the architecture that it is compiled for. cubecl writes the definitions
    /// before a kernel, and the declarations in it, in the order of a hash table, another one in each
    /// process, and lays out shared memory in that order: their order does not count, nor where an array
    /// lies, but where the last one ends.
    pub fn new(text: &str, architecture: &str) -> Self {
        let kernel = text.find("extern \"C\" __global__").unwrap_or(text.len());
        let (definitions, kernel) = text.split_at(kernel);
        let mut definitions = items(definitions);
        definitions.sort_unstable();
        let (mut declarations, mut statements, mut shared) = (Vec::new(), Vec::<&str>::new(), 0);
        for line in kernel.lines() {
            let place = line
                .split_once("dynamic_shared_mem[")
                .and_then(|(array, place)| Some((array, place.split_once(']')?.0.parse::<usize>().ok()?)));
            match (place, line.strip_suffix(';')) {
                (Some((array, place)), _) => {
                    let bytes = statements.pop().unwrap_or_default();
                    let size = bytes.rsplit(' ').nth(1).and_then(|size| size.parse().ok()).unwrap_or(0);
                    shared = shared.max(place + size);
                    declarations.push((bytes, array));
                }
                (None, Some(words)) if words.contains(' ') && !words.contains(['=', '(', '}']) => {
                    declarations.push((line, ""));
                }
                _ => statements.push(line),
            }
        }
        declarations.sort_unstable();
        let shared = shared.to_string();
        let declarations = declarations.into_iter().flat_map(|(bytes, array)| [bytes, array]);
        let mut hasher = blake3::Hasher::new();
        for part in definitions.into_iter().chain(declarations).chain([&*shared]).chain(statements) {
            hasher.update(part.as_bytes()).update(&[0]);
        }
        Self(format!("{architecture}-{}", hasher.finalize().to_hex()))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(&self.0)
    }
}

/// Definitions of CUDA C++, each whole: it ends with a line outside all braces that ends it.
fn items(text: &str) -> Vec<&str> {
    let (mut found, mut begin, mut end, mut depth) = (Vec::new(), 0, 0, 0_i64);
    for line in text.split_inclusive('\n') {
        end += line.len();
        for byte in line.bytes() {
            depth += i64::from(byte == b'{') - i64::from(byte == b'}');
        }
        let line = line.trim();
        if depth == 0 && (line.starts_with('#') || line.ends_with([';', '}'])) {
            found.push(text[begin..end].trim());
            begin = end;
        }
    }
    found.push(text[begin..].trim());
    found
}

/// Kernels of one compiler, on disk.
pub struct Kernels {
    own: PathBuf,
    /// What came compiled, where this driver loads it.
    shipped: Option<PathBuf>,
}

impl Kernels {
    /// Kernels of a compiler below `place`, and kernels that came compiled by a CUDA of this driver or older.
    pub fn open(place: &Path, compiler: Version, driver: Version) -> Self {
        let mut kernels = Self::new(&place.join(format!("nvrtc-{}.{}", compiler.major, compiler.minor)));
        let shipped = std::env::var_os(VARIABLE).filter(|shipped| !shipped.is_empty()).map(PathBuf::from);
        let came = shipped.map(|shipped| {
            let made = made(&shipped, driver).inspect(|_| kernels.shipped = Some(shipped.clone()));
            made.unwrap_or_else(|why| {
                tracing::warn!("{VARIABLE} is {}: {why}; kernels are compiled here", shipped.display());
                why
            })
        });
        SOURCE.get_or_init(|| came.unwrap_or_else(|| "no precompiled kernels".to_owned()));
        kernels
    }

    fn new(own: &Path) -> Self {
        if let Err(why) = fs::create_dir_all(own) {
            tracing::warn!(dir = %own.display(), %why, "cannot save compiled kernels; each start compiles them again");
        }
        remove_all_but(MOST, own);
        Self { own: own.to_owned(), shipped: None }
    }

    /// What the driver is given for a kernel, if it was compiled before.
    pub fn find(&self, key: &Key) -> Option<Vec<u8>> {
        let shipped =
            self.shipped.as_ref().and_then(|shipped| fs::read(shipped.join(format!("{key}.cubin"))).ok());
        shipped.or_else(|| {
            let own = self.own.join(format!("{key}.ptx"));
            let code = fs::read(&own).ok()?;
            // So that it is among the last to go. A disk that refuses that loses nothing else.
            let _ = fs::File::open(&own).and_then(|file| file.set_modified(clock::date()));
            Some(code)
        })
    }

    /// Keeps a kernel that was just compiled here.
    pub fn keep(&self, key: &Key, text: &str, code: &[u8]) {
        let before = HERE.fetch_add(1, Ordering::Relaxed);
        if before == 0 && self.shipped.is_some() {
            tracing::warn!(kernel = %key, "a kernel is not among the precompiled ones and is compiled here; more may follow");
        }
        // The code comes last: a kernel that is found has both.
        let kept = self.write(&format!("{key}.cu"), text.as_bytes());
        if let Err(why) = kept.and_then(|()| self.write(&format!("{key}.ptx"), code)) {
            tracing::debug!(dir = %self.own.display(), %why, "cannot save a compiled kernel");
        }
    }

    /// A file, whole or absent: other processes compile, too.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let unfinished = self.own.join(format!("{name}.{}", process::id()));
        fs::write(&unfinished, bytes)?;
        fs::rename(unfinished, self.own.join(name))
    }
}

/// Leaves the kernels of a directory that were used last. What cannot be removed stays: it costs room, and
/// nothing else.
fn remove_all_but(most: usize, dir: &Path) {
    let Ok(found) = fs::read_dir(dir) else { return };
    let codes = found.flatten().map(|entry| entry.path());
    let codes = codes.filter(|path| path.extension().is_some_and(|extension| extension == "ptx"));
    let used =
        |path: &Path| fs::metadata(path).and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let mut codes: Vec<(SystemTime, PathBuf)> = codes.map(|path| (used(&path), path)).collect();
    if codes.len() <= most {
        return;
    }
    codes.sort_by_key(|(when, _)| std::cmp::Reverse(*when));
    for (_, old) in codes.into_iter().skip(most) {
        if let Err(why) = fs::remove_file(&old).and_then(|()| fs::remove_file(old.with_extension("cu"))) {
            tracing::debug!(kernel = %old.display(), %why, "cannot remove a kernel that has not been used for a long time");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const TEXT: &str = "#include <cuda_runtime.h>\ntypedef unsigned int uint32;\nstruct Pair {\n    uint32 a;\n    \
                        uint32 b;\n};\n\nextern \"C\" __global__ void kernel(uint32 *x) {\n    x[0] = x[1] * 2;\n}\n";

    #[test]
    fn a_kernel_is_known_by_what_it_computes_and_for_which_gpu() {
        let key = |text: &str| Key::new(text, "sm_90a");
        assert!(key(TEXT).to_string().starts_with("sm_90a-"));
        assert_ne!(key(TEXT), key(&TEXT.replace("* 2", "* 3")), "an edited line");
        assert_ne!(key(TEXT), Key::new(TEXT, "sm_80"), "another GPU");
        let fields = TEXT.replace("uint32 a;\n    uint32 b;", "uint32 b;\n    uint32 a;");
        assert_ne!(key(TEXT), key(&fields), "a structure's fields in another order");
        let (typedef, pair) =
            ("typedef unsigned int uint32;\n", "struct Pair {\n    uint32 a;\n    uint32 b;\n};\n");
        let reordered = TEXT.replace(typedef, "").replace(pair, &format!("{pair}{typedef}"));
        assert!(reordered != TEXT && key(TEXT) == key(&reordered), "definitions in another order");
        let declared = |lines: &[&str]| TEXT.replace("    x[0]", &format!("{}\n    x[0]", lines.join("\n")));
        let array = |name: &str, bytes: usize, at: usize| {
            format!(
                "// Shared array size: {}, {bytes} bytes\n\
                 float *{name} = reinterpret_cast<float*>(&dynamic_shared_mem[{at}]);",
                bytes / 4
            )
        };
        let (a, b, x, y) = (array("a", 128, 0), array("b", 256, 128), "float l_mut_1;", "uint32 l_mut_2;");
        let (before, after) = (array("b", 256, 0), array("a", 128, 256));
        let one = key(&declared(&[&a, &b, x, y]));
        assert_eq!(one, key(&declared(&[&before, &after, y, x])), "declarations in another order");
        assert_ne!(one, key(&declared(&[&a, &array("b", 256, 256), x, y])), "more shared memory");
        assert_ne!(one, key(&declared(&[&a, &array("b", 512, 128), x, y])), "a larger array");
    }

    #[test]
    fn only_a_kernel_that_was_edited_is_compiled_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let key = |text: &str| Key::new(text, "sm_90a");
        let other = TEXT.replace("kernel", "other");
        let build = Kernels::new(dir.path());
        build.keep(&key(TEXT), TEXT, b"code of a kernel");
        build.keep(&key(&other), &other, b"code of another");
        // The next build of the program, in which one line differs.
        let next = Kernels::new(dir.path());
        assert_eq!(next.find(&key(&TEXT.replace("* 2", "* 3"))), None);
        assert_eq!(next.find(&key(&other)).as_deref(), Some(&b"code of another"[..]));
        let text = dir.path().join(format!("{}.cu", key(&other)));
        assert_eq!(fs::read_to_string(text).expect("kept"), other);
    }

    #[test]
    fn what_came_compiled_is_found_where_the_driver_loads_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let driver = |major| Version { major, minor: 0 };
        let none = made(dir.path(), driver(13)).expect_err("nothing is there");
        assert!(none.contains("compiled"), "{none}");
        fs::write(dir.path().join(MADE), "13.0 143\n").expect("written");
        let old = made(dir.path(), driver(12)).expect_err("a driver that cannot load them");
        assert!(old.contains("CUDA 13.0"), "{old}");
        assert_eq!(made(dir.path(), driver(13)).expect("they fit"), "143 precompiled by CUDA 13.0");
        let key = Key::new(TEXT, "sm_90a");
        fs::write(dir.path().join(format!("{key}.cubin")), "machine code").expect("written");
        let mut kernels = Kernels::new(&dir.path().join("own"));
        assert_eq!(kernels.find(&key), None);
        kernels.shipped = Some(dir.path().to_owned());
        assert_eq!(kernels.find(&key).as_deref(), Some(&b"machine code"[..]));
    }

    #[test]
    fn kernels_that_were_not_used_for_long_are_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let kernels = Kernels::new(dir.path());
        let key = |number: u64| Key::new(&TEXT.replace('2', &number.to_string()), "sm_90a");
        for number in 10..15 {
            kernels.keep(&key(number), TEXT, b"code");
            let file = fs::File::open(dir.path().join(format!("{}.ptx", key(number)))).expect("kept");
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(number)).expect("set");
        }
        // It is used, and so stays.
        assert!(kernels.find(&key(10)).is_some());
        remove_all_but(2, dir.path());
        let left: Vec<u64> = (10..15).filter(|&number| kernels.find(&key(number)).is_some()).collect();
        assert_eq!(left, [10, 14]);
        assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 4);
    }
}
