//! What a process knows of buckets: clients, objects as they were first seen, and the cache of the local
//! disk. There is one of each for the whole process, like its file system.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    env,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use futures_util::TryStreamExt;
use object_store::path::Path as StorePath;
use url::Url;

use crate::{
    bucket::{Bucket, origin},
    cache::Cache,
    error::RemoteError,
    object::{Object, ObjectStamp},
    waiting::wait,
};

/// Objects below one address, at most: a data set of 400,000 episodes with four cameras.
const MAX_OBJECTS: usize = 2_000_000;

/// Where blocks are kept, and how many bytes of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockCache {
    /// The directory; `coxswain/buckets` in the user's directory of caches when absent.
    pub dir: Option<PathBuf>,
    /// Bytes that all blocks may take.
    pub bytes: u64,
}

impl Default for BlockCache {
    fn default() -> Self {
        Self { dir: None, bytes: 64 << 30 }
    }
}

impl BlockCache {
    fn directory(&self) -> Result<PathBuf, RemoteError> {
        let below = |home: &str, path: &str| {
            let home = env::var_os(home).filter(|home| Path::new(home).is_absolute())?;
            Some(Path::new(&home).join(path))
        };
        let named = self.dir.clone().or_else(|| below("XDG_CACHE_HOME", "coxswain/buckets"));
        named.or_else(|| below("HOME", ".cache/coxswain/buckets")).ok_or_else(|| RemoteError::Cache {
            path: PathBuf::from("~/.cache"),
            message: "neither XDG_CACHE_HOME nor HOME is an absolute path".into(),
        })
    }
}

#[derive(Default)]
struct Remotes {
    kept: BlockCache,
    cache: Option<Arc<Cache>>,
    buckets: HashMap<String, Arc<Bucket>>,
    /// By address.
    objects: BTreeMap<String, ObjectEntry>,
    /// Addresses below which all objects are known; each ends in `/`.
    listed: BTreeSet<String>,
}

struct ObjectEntry {
    seen: ObjectStamp,
    opened: Option<Arc<Object>>,
}

fn remotes() -> MutexGuard<'static, Remotes> {
    static REMOTES: OnceLock<Mutex<Remotes>> = OnceLock::new();
    // Whole after each statement.
    REMOTES.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where blocks of objects that are opened from now on are kept.
pub fn keep(kept: BlockCache) {
    let mut all = remotes();
    if all.kept != kept {
        (all.kept, all.cache) = (kept, None);
    }
}

/// Asks once what lies below `address`, and remembers it; then [`bytes`], [`entries`] and [`open`] need not
/// ask. The first that reaches a bucket, and so the first that credentials and addresses fail at. A server
/// that does not list says nothing here.
pub fn enter(address: &str) -> Result<(), RemoteError> {
    let (bucket, path) = (bucket(address)?, path(address)?);
    let prefix = format!("{}/", normal(address)?.trim_end_matches('/'));
    if !bucket.lists() || remotes().listed.iter().any(|listed| prefix.starts_with(listed)) {
        return Ok(());
    }
    let found = wait({
        let bucket = bucket.clone();
        async move {
            bucket
                .persist(|| async {
                    let mut found = Vec::new();
                    let mut list = bucket.store.list(Some(&path));
                    while let Some(meta) = list.try_next().await? {
                        found.push((meta.location.to_string(), ObjectStamp::of(&meta)));
                        if found.len() > MAX_OBJECTS {
                            break;
                        }
                    }
                    Ok(found)
                })
                .await
        }
    })?;
    if found.len() > MAX_OBJECTS {
        let what = format!("more than {MAX_OBJECTS} objects under {prefix}");
        return Err(RemoteError::Refused(format!("{what}; name the data set's own address")));
    }
    let mut all = remotes();
    for (location, seen) in found {
        let known = ObjectEntry { seen, opened: None };
        all.objects.entry(format!("{}/{location}", bucket.origin)).or_insert(known);
    }
    all.listed.insert(prefix);
    Ok(())
}

/// Names right below `address`, in order; `None` from a server that does not list.
pub fn entries(address: &str) -> Result<Option<Vec<String>>, RemoteError> {
    if !bucket(address)?.lists() {
        return Ok(None);
    }
    enter(address)?;
    let prefix = format!("{}/", normal(address)?.trim_end_matches('/'));
    let all = remotes();
    let below = all.objects.range(prefix.clone()..).map_while(|(address, _)| address.strip_prefix(&prefix));
    let mut names: Vec<String> = below.filter_map(|path| path.split('/').next()).map(str::to_owned).collect();
    names.dedup();
    Ok(Some(names))
}

/// What is known of all objects below `address`: their paths from there on, and what they were at first.
pub fn known(address: &str) -> Result<Vec<(String, ObjectStamp)>, RemoteError> {
    let prefix = format!("{}/", normal(address)?.trim_end_matches('/'));
    let all = remotes();
    let below = all.objects.range(prefix.clone()..);
    let below = below.map_while(|(address, known)| Some((address.strip_prefix(&prefix)?, known)));
    Ok(below.map(|(path, known)| (path.to_owned(), known.seen.clone())).collect())
}

/// The length of an object; `None` if it is not there.
pub fn bytes(address: &str) -> Result<Option<u64>, RemoteError> {
    Ok(seen(address)?.map(|seen| seen.len))
}

/// An object to be read, as it was when this process first saw it.
pub fn open(address: &str) -> Result<Arc<Object>, RemoteError> {
    let address = normal(address)?;
    if let Some(opened) = remotes().objects.get(&address).and_then(|known| known.opened.clone()) {
        return Ok(opened);
    }
    let seen = seen(&address)?.ok_or(RemoteError::Missing)?;
    let (bucket, path, cache) = (bucket(&address)?, path(&address)?, cache()?);
    let object = Arc::new(Object::new(bucket, path, seen.clone(), cache));
    let mut all = remotes();
    let known = all.objects.entry(address).or_insert(ObjectEntry { seen, opened: None });
    Ok(known.opened.get_or_insert(object).clone())
}

/// What an object was at first; asked for now, if it was not before.
fn seen(address: &str) -> Result<Option<ObjectStamp>, RemoteError> {
    let address = normal(address)?;
    let known = {
        let all = remotes();
        let known = all.objects.get(&address).map(|known| known.seen.clone());
        let listed = all.listed.iter().any(|prefix| address.starts_with(prefix));
        known.map(Some).or_else(|| listed.then_some(None))
    };
    if let Some(known) = known {
        return Ok(known);
    }
    let (bucket, path) = (bucket(&address)?, path(&address)?);
    let asked = wait(async move {
        let head = || async {
            let options = object_store::GetOptions { head: true, ..Default::default() };
            bucket.store.get_opts(&path, options).await.map(|result| ObjectStamp::of(&result.meta))
        };
        bucket.persist(head).await
    });
    match asked {
        Ok(seen) => {
            let known = ObjectEntry { seen, opened: None };
            Ok(Some(remotes().objects.entry(address).or_insert(known).seen.clone()))
        }
        Err(RemoteError::Missing) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Where what is brought is kept on the local disk.
pub fn directory() -> Result<PathBuf, RemoteError> {
    remotes().kept.directory()
}

fn cache() -> Result<Arc<Cache>, RemoteError> {
    let mut all = remotes();
    if let Some(cache) = &all.cache {
        return Ok(cache.clone());
    }
    let cache = Arc::new(Cache::open(&all.kept.directory()?, all.kept.bytes)?);
    all.cache = Some(cache.clone());
    Ok(cache)
}

/// The bucket of an address, one client of it for all that lies there.
pub fn bucket(address: &str) -> Result<Arc<Bucket>, RemoteError> {
    let url = parsed(address)?;
    let mut all = remotes();
    if let Some(bucket) = all.buckets.get(&origin(&url)) {
        return Ok(bucket.clone());
    }
    let bucket = Arc::new(Bucket::connect(&url)?);
    all.buckets.insert(bucket.origin.clone(), bucket.clone());
    Ok(bucket)
}

/// The object's path within its bucket.
pub fn path(address: &str) -> Result<StorePath, RemoteError> {
    let refused = |error: object_store::path::Error| RemoteError::Address(error.to_string());
    StorePath::from_url_path(parsed(address)?.path()).map_err(refused)
}

/// An address in the one way that objects are known by.
fn normal(address: &str) -> Result<String, RemoteError> {
    Ok(format!("{}/{}", origin(&parsed(address)?), path(address)?))
}

fn parsed(address: &str) -> Result<Url, RemoteError> {
    let url = Url::parse(address).map_err(|error| RemoteError::Address(error.to_string()))?;
    match url.host_str() {
        Some(host) if !host.is_empty() => Ok(url),
        _ => Err(RemoteError::Address("it names no bucket or server".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_object_has_one_address() {
        for way in ["s3://bucket/a/b", "s3://bucket/a/b/"] {
            assert_eq!(normal(way).unwrap(), "s3://bucket/a/b", "{way}");
        }
        assert_eq!(normal("https://host:9000/a%20b").unwrap(), "https://host:9000/a b");
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for bad in ["s3://", "s3:bucket/a", "s3://bucket/a//b", "ftp://host/a", "nonsense"] {
            let error = bytes(bad).unwrap_err();
            assert!(matches!(error, RemoteError::Address(_)), "{bad}: {error}");
        }
    }
}
