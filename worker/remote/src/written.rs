//! [`Storage`] in a bucket. A large file goes up in parts, several at a time and each tried again by itself;
//! it comes back by ranges.

use std::{fs::File, io, ops::Range, os::unix::fs::FileExt, sync::Arc};

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{
    Error, GetOptions, GetRange, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion,
    multipart::{MultipartStore, PartId},
    path::Path,
};
use tokio::sync::Semaphore;

use crate::{
    bucket::Bucket,
    error::RemoteError,
    remotes,
    storage::{Storage, StorageError, Version},
    waiting::wait,
};

/// Bytes of a part, at least: S3 takes none below 5 MiB but the last.
const PART_BYTES: u64 = 8 << 20;
/// Parts of a file, at most: S3 takes 10,000.
const PARTS: u64 = 9_000;
/// Bytes of an object that is read as one.
const MAX_SMALL: u64 = 64 << 20;
/// Parts of all files in memory at once.
const AT_ONCE: usize = 8;

static PERMITS: Semaphore = Semaphore::const_new(AT_ONCE);

/// A folder of a bucket.
struct BucketFolder {
    bucket: Arc<Bucket>,
    /// The folder's path, within its bucket.
    path: Path,
}

/// The folder at an address. Asks nothing yet.
pub fn storage(address: &str) -> Result<Box<dyn Storage>, StorageError> {
    let at = |error| fault(address.to_owned(), error);
    let bucket = remotes::bucket(address).map_err(at)?;
    Ok(Box::new(BucketFolder { bucket, path: remotes::path(address).map_err(at)? }))
}

fn fault(object: String, error: RemoteError) -> StorageError {
    let of_object = matches!(error, RemoteError::Missing | RemoteError::Changed(_) | RemoteError::Refused(_));
    StorageError { object, fault: error.to_string(), of_object }
}

impl BucketFolder {
    fn at(&self, name: &str) -> Path {
        name.split('/').fold(self.path.clone(), |path, part| path.join(part))
    }

    /// What a future makes of one object of this folder.
    fn of<T, F>(&self, name: &str, ask: impl FnOnce(Arc<Bucket>, Path) -> F) -> Result<T, StorageError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, RemoteError>> + Send + 'static,
    {
        let path = self.at(name);
        let address = format!("{}/{path}", self.bucket.origin);
        wait(ask(self.bucket.clone(), path)).map_err(|error| fault(address, error))
    }
}

impl Storage for BucketFolder {
    fn get(&self, name: &str) -> Result<Option<(Vec<u8>, Version)>, StorageError> {
        self.of(name, |bucket, path| async move {
            let got = bucket.persist(|| async {
                let got = bucket.store.get(&path).await?;
                if got.meta.size > MAX_SMALL {
                    let source = format!("has {} bytes; the maximum is {MAX_SMALL}", got.meta.size).into();
                    return Err(Error::NotSupported { source });
                }
                let version = Version { tag: got.meta.e_tag.clone(), number: got.meta.version.clone() };
                Ok((got.bytes().await?.to_vec(), version))
            });
            match got.await {
                Ok(found) => Ok(Some(found)),
                Err(RemoteError::Missing) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    fn swap(
        &self,
        name: &str,
        bytes: &[u8],
        before: Option<&Version>,
    ) -> Result<Option<Version>, StorageError> {
        let payload = PutPayload::from(bytes.to_vec());
        let mode = match before.cloned() {
            Some(Version { tag, number }) => PutMode::Update(UpdateVersion { e_tag: tag, version: number }),
            None => PutMode::Create,
        };
        self.of(name, |bucket, path| async move {
            let put = bucket.persist(|| async {
                let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
                match bucket.store.put_opts(&path, payload.clone(), options).await {
                    Ok(put) => Ok(Some(Version { tag: put.e_tag, number: put.version })),
                    Err(Error::Precondition { .. } | Error::AlreadyExists { .. }) => Ok(None),
                    Err(error) => Err(error),
                }
            });
            put.await
        })
    }

    fn upload(&self, name: &str, file: &File, bytes: u64) -> Result<(), StorageError> {
        let file = self.own(name, file)?;
        self.of(name, |bucket, path| async move {
            match bytes <= PART_BYTES {
                true => put_whole(&bucket, &path, &file, bytes).await,
                false => put_parts(&bucket, &path, &file, bytes).await,
            }
        })
    }

    fn download(&self, name: &str, bytes: u64, file: &File) -> Result<(), StorageError> {
        let file = self.own(name, file)?;
        self.of(name, |bucket, path| async move {
            let brought = stream::iter(parts(bytes)).map(|(_, range)| bring(&bucket, &path, &file, range));
            brought.buffer_unordered(AT_ONCE).try_collect::<()>().await
        })
    }

    fn list(&self, below: &str) -> Result<Vec<String>, StorageError> {
        let folder = self.path.clone();
        self.of(below, |bucket, path| async move {
            let found = bucket.persist(|| async {
                let found = bucket.store.list(Some(&path)).map_ok(|meta| meta.location);
                found.try_collect::<Vec<_>>().await
            });
            let name = |path: Path| {
                let parts: Vec<_> =
                    path.prefix_match(&folder)?.map(|part| part.as_ref().to_owned()).collect();
                Some(parts.join("/"))
            };
            Ok(found.await?.into_iter().filter_map(name).collect())
        })
    }

    fn remove(&self, name: &str) -> Result<(), StorageError> {
        self.of(name, |bucket, path| async move {
            match bucket.persist(|| bucket.store.delete(&path)).await {
                Err(RemoteError::Missing) => Ok(()),
                removed => removed,
            }
        })
    }
}

impl BucketFolder {
    fn own(&self, name: &str, file: &File) -> Result<File, StorageError> {
        let object = format!("{}/{}", self.bucket.origin, self.at(name));
        file.try_clone().map_err(|error| fault(object, local(&error)))
    }
}

/// A file's parts, in order: number and range.
fn parts(bytes: u64) -> impl Iterator<Item = (usize, Range<u64>)> {
    let size = PART_BYTES.max(bytes.div_ceil(PARTS));
    (0..bytes.div_ceil(size)).map(move |part| (part as usize, part * size..((part + 1) * size).min(bytes)))
}

async fn put_whole(bucket: &Bucket, path: &Path, file: &File, bytes: u64) -> Result<(), RemoteError> {
    let _permit = PERMITS.acquire().await.map_err(|error| RemoteError::Refused(error.to_string()))?;
    let payload = read(file, 0..bytes)?;
    bucket.persist(|| bucket.store.put(path, payload.clone())).await.map(drop)
}

async fn put_parts(bucket: &Bucket, path: &Path, file: &File, bytes: u64) -> Result<(), RemoteError> {
    let store = bucket.parts.as_deref();
    let store =
        store.ok_or_else(|| RemoteError::Refused("the server does not support multipart uploads".into()))?;
    let id = bucket.persist(|| store.create_multipart(path)).await?;
    let put = |(number, range)| {
        let id = &id;
        async move {
            let _permit = PERMITS.acquire().await.map_err(|error| RemoteError::Refused(error.to_string()))?;
            let payload = read(file, range)?;
            bucket.persist(|| store.put_part(path, id, number, payload.clone())).await
        }
    };
    let put: Result<Vec<PartId>, _> =
        stream::iter(parts(bytes)).map(put).buffered(AT_ONCE).try_collect().await;
    let completed = match put {
        Ok(ids) => bucket.persist(|| store.complete_multipart(path, &id, ids.clone())).await.map(drop),
        Err(error) => Err(error),
    };
    match completed {
        // Completed by an attempt whose answer was lost: there is no such upload any more.
        Err(RemoteError::Missing) => {
            let meta = bucket.persist(|| bucket.store.head(path)).await?;
            if meta.size == bytes { Ok(()) } else { Err(RemoteError::Missing) }
        }
        Err(error) => {
            abort(store, path, &id).await;
            Err(error)
        }
        Ok(()) => Ok(()),
    }
}

/// Parts of what was given up take room that nobody sees.
async fn abort(store: &dyn MultipartStore, path: &Path, id: &String) {
    if let Err(error) = store.abort_multipart(path, id).await {
        tracing::debug!(%path, %error, "cannot remove the parts of an abandoned upload");
    }
}

async fn bring(bucket: &Bucket, path: &Path, file: &File, range: Range<u64>) -> Result<(), RemoteError> {
    let _permit = PERMITS.acquire().await.map_err(|error| RemoteError::Refused(error.to_string()))?;
    let wanted = (range.end - range.start) as usize;
    let got = bucket.persist(|| async {
        let options = GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
        bucket.store.get_opts(path, options).await?.bytes().await
    });
    let bytes = got.await?;
    if bytes.len() != wanted {
        return Err(RemoteError::Changed(format!("{} bytes instead of {wanted}", bytes.len())));
    }
    file.write_all_at(&bytes, range.start).map_err(|error| local(&error))
}

fn read(file: &File, range: Range<u64>) -> Result<PutPayload, RemoteError> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    file.read_exact_at(&mut bytes, range.start).map_err(|error| local(&error))?;
    Ok(PutPayload::from(bytes))
}

fn local(error: &io::Error) -> RemoteError {
    RemoteError::Local(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_files_parts_are_all_of_it_and_few_enough() {
        assert_eq!(parts(0).count(), 0);
        assert_eq!(parts(PART_BYTES).collect::<Vec<_>>(), [(0, 0..PART_BYTES)]);
        let large = 200 << 30;
        let all: Vec<_> = parts(large).collect();
        assert!(all.len() as u64 <= PARTS && all.windows(2).all(|two| two[0].1.end == two[1].1.start));
        assert_eq!((all[0].1.start, all.last().unwrap().1.end), (0, large));
    }
}
