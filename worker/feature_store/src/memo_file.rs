//! How a memo lies on disk; read and written a column at a time, so that nothing of it is in memory twice.
//!
//! ```text
//! magic "COXVLMEM", version u32, columns u32
//! a column:  path, what (u32 length and text each), stamp 4 x u64, digests u64, digest [32] x digests
//! end:       BLAKE3 [16] of everything before
//! ```

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::File,
    io::{self, BufReader, Read, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{digest::Digest, error::StoreError, stamp::Stamp, usage};

const MAGIC: &[u8; 8] = b"COXVLMEM";
const VERSION: u32 = 1;
const CHECKSUM: usize = 16;
/// Paths and names are shorter than this; a length beyond it is damage.
const LONGEST_TEXT: usize = 64 << 10;
/// Digests that are read, or handed to the system, at once.
const AT_ONCE: usize = 2048;

/// What was found in files, by file and name.
pub(super) type Columns = BTreeMap<(PathBuf, String), (Stamp, Arc<[Digest]>)>;

/// What is remembered at `path`: nothing if there is no such file, or if it is older or damaged; a newer one
/// is refused.
pub(super) fn read(path: &Path) -> Result<Columns, StoreError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Columns::new()),
        Err(error) => return Err(StoreError::io("read", path)(error)),
    };
    let left = file.metadata().map_err(StoreError::io("read", path))?.len();
    let mut reader = Reader { from: BufReader::new(file), hash: blake3::Hasher::new(), left };
    match reader.memo() {
        Ok(columns) => Ok(columns),
        Err(Fault::Newer(found)) => {
            Err(StoreError::Newer { path: path.to_path_buf(), found: found.into(), known: VERSION })
        }
        Err(Fault::Damaged) => {
            tracing::warn!(path = %path.display(), "memo of file digests is damaged; the files are read again");
            Ok(Columns::new())
        }
    }
}

/// Writes all of it, whole or not at all.
pub(super) fn write(path: &Path, columns: &Columns) -> Result<(), StoreError> {
    usage::write_whole_by(path, |file| {
        let mut out = Hashing { to: io::BufWriter::new(file), hash: blake3::Hasher::new() };
        out.put(MAGIC)?;
        out.put(&VERSION.to_le_bytes())?;
        out.put(&(columns.len() as u32).to_le_bytes())?;
        for ((file, what), (stamp, digests)) in columns {
            for text in [file.as_os_str().as_bytes(), what.as_bytes()] {
                out.put(&(text.len() as u32).to_le_bytes())?;
                out.put(text)?;
            }
            stamp.0.iter().try_for_each(|word| out.put(&word.to_le_bytes()))?;
            out.put(&(digests.len() as u64).to_le_bytes())?;
            digests.iter().try_for_each(|digest| out.put(&digest.0))?;
        }
        let Hashing { mut to, hash } = out;
        to.write_all(&hash.finalize().as_bytes()[..CHECKSUM])?;
        to.flush()
    })
}

struct Hashing<W: Write> {
    to: W,
    hash: blake3::Hasher,
}

impl<W: Write> Hashing<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hash.update(bytes);
        self.to.write_all(bytes)
    }
}

enum Fault {
    Newer(u32),
    Damaged,
}

impl From<io::Error> for Fault {
    fn from(_: io::Error) -> Self {
        Self::Damaged
    }
}

/// Reads and hashes; knows how many bytes can still come, so that a damaged count reserves nothing.
struct Reader<R> {
    from: R,
    hash: blake3::Hasher,
    left: u64,
}

impl<R: Read> Reader<R> {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Fault> {
        self.from.read_exact(bytes)?;
        self.hash.update(bytes);
        self.left = self.left.saturating_sub(bytes.len() as u64);
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<Vec<u8>, Fault> {
        let len = self.u32()? as usize;
        if len > LONGEST_TEXT {
            return Err(Fault::Damaged);
        }
        let mut text = vec![0; len];
        self.fill(&mut text)?;
        Ok(text)
    }

    fn digests(&mut self) -> Result<Vec<Digest>, Fault> {
        let count = self.u64()?;
        if count > self.left / 32 {
            return Err(Fault::Damaged);
        }
        let mut digests = Vec::with_capacity(count as usize);
        let mut bytes = vec![0; 32 * AT_ONCE.min(count as usize)];
        while digests.len() < count as usize {
            let some = &mut bytes[..32 * AT_ONCE.min(count as usize - digests.len())];
            self.fill(some)?;
            digests.extend(some.as_chunks::<32>().0.iter().map(|digest| Digest(*digest)));
        }
        Ok(digests)
    }

    fn memo(&mut self) -> Result<Columns, Fault> {
        if self.array()? != *MAGIC {
            return Err(Fault::Damaged);
        }
        match self.u32()? {
            newer if newer > VERSION => return Err(Fault::Newer(newer)),
            _ => {}
        }
        let mut columns = Columns::new();
        for _ in 0..self.u32()? {
            let file = PathBuf::from(OsStr::from_bytes(&self.text()?));
            let what = String::from_utf8(self.text()?).map_err(|_| Fault::Damaged)?;
            let stamp = Stamp([self.u64()?, self.u64()?, self.u64()?, self.u64()?]);
            columns.insert((file, what), (stamp, self.digests()?.into()));
        }
        let expected = self.hash.finalize();
        let found: [u8; CHECKSUM] = self.array()?;
        let sound = self.left == 0 && found == expected.as_bytes()[..CHECKSUM];
        sound.then_some(columns).ok_or(Fault::Damaged)
    }
}
