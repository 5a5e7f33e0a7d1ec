//! One bucket, container or server: how it is reached, with the environment's credentials, and requests that
//! are tried again until a deadline.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use object_store::{
    ClientConfigKey, Error, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    http::HttpBuilder,
    multipart::MultipartStore,
};
use url::Url;

use crate::error::RemoteError;

/// How long a request is tried again. A server that is restarted is back by then, and a worker that waits is
/// still no hang.
const DEADLINE: Duration = Duration::from_secs(90);
/// How long a request is tried again before the first answer: what is wrong then is an address or a network,
/// and somebody waits to be told.
const FIRST_DEADLINE: Duration = Duration::from_secs(15);
/// One request, its answer included: a block in that time is 50 KB a second.
const REQUEST: &str = "20 seconds";
/// Until a connection stands.
const CONNECT: &str = "5 seconds";
/// Between the first attempts; each time twice as long, up to the second.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];

/// Attempts before the log says that requests fail: a rank that is given up for standing still has said why.
const TOLD_AFTER: u32 = 4;

/// What servers call a bucket that is not there.
const NO_BUCKET: [&str; 3] = ["NoSuchBucket", "ContainerNotFound", "bucket does not exist"];

/// Whose credentials are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Provider {
    Aws,
    Google,
    Azure,
    Http,
}

impl Provider {
    /// What lets it be read.
    fn remedy(self) -> &'static str {
        match self {
            Self::Aws => {
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL \
                 where they are needed), or AWS_SKIP_SIGNATURE=true for a public bucket"
            }
            Self::Google => {
                "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or GOOGLE_SKIP_SIGNATURE=true for a public bucket"
            }
            Self::Azure => {
                "set AZURE_STORAGE_ACCOUNT_NAME and one of AZURE_STORAGE_ACCOUNT_KEY and AZURE_STORAGE_SAS_KEY; \
                 for a public container set AZURE_SKIP_SIGNATURE=true"
            }
            Self::Http => "web servers that require credentials are not supported; use a bucket",
        }
    }

    /// What of the environment cannot be used.
    fn unusable(self, error: &Error) -> RemoteError {
        RemoteError::Environment { message: words(error), remedy: self.remedy() }
    }
}

/// A bucket that can be asked.
pub struct Bucket {
    /// What its objects' addresses begin with: `s3://bucket`.
    pub origin: String,
    pub store: Arc<dyn ObjectStore>,
    /// How large objects are written; web servers cannot.
    pub parts: Option<Arc<dyn MultipartStore>>,
    provider: Provider,
    /// Whether it has answered once.
    answered: AtomicBool,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucket").field("origin", &self.origin).finish_non_exhaustive()
    }
}

/// The part of an address that names the bucket.
pub fn origin(url: &Url) -> String {
    url[..url::Position::BeforePath].to_owned()
}

impl Bucket {
    /// A client of the bucket that `url` lies in. Asks nothing yet.
    pub fn connect(url: &Url) -> Result<Self, RemoteError> {
        // Fails where the process has one already, which is as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let once = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let times = [(ClientConfigKey::Timeout, REQUEST), (ClientConfigKey::ConnectTimeout, CONNECT)];
        let (provider, store, parts): (_, Arc<dyn ObjectStore>, Option<Arc<dyn MultipartStore>>) = match url
            .scheme()
        {
            "s3" | "s3a" => {
                let builder = AmazonS3Builder::from_env().with_url(url.as_str()).with_retry(once);
                let builder = times.into_iter().fold(builder, |builder, (key, value)| {
                    builder.with_config(AmazonS3ConfigKey::Client(key), value)
                });
                let client = Arc::new(builder.build().map_err(|error| Provider::Aws.unusable(&error))?);
                (Provider::Aws, client.clone(), Some(client))
            }
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env().with_url(url.as_str()).with_retry(once);
                let builder = times.into_iter().fold(builder, |builder, (key, value)| {
                    builder.with_config(GoogleConfigKey::Client(key), value)
                });
                let client = Arc::new(builder.build().map_err(|error| Provider::Google.unusable(&error))?);
                (Provider::Google, client.clone(), Some(client))
            }
            "az" | "abfs" | "abfss" => {
                let builder = MicrosoftAzureBuilder::from_env().with_url(url.as_str()).with_retry(once);
                let builder = times.into_iter().fold(builder, |builder, (key, value)| {
                    builder.with_config(AzureConfigKey::Client(key), value)
                });
                let client = Arc::new(builder.build().map_err(|error| Provider::Azure.unusable(&error))?);
                (Provider::Azure, client.clone(), Some(client))
            }
            "http" | "https" => {
                let builder = HttpBuilder::new().with_url(origin(url)).with_retry(once);
                let builder =
                    times.into_iter().fold(builder, |builder, (key, value)| builder.with_config(key, value));
                let builder = builder.with_config(ClientConfigKey::AllowHttp, "true");
                let client = builder.build().map_err(|error| RemoteError::Refused(words(&error)))?;
                (Provider::Http, Arc::new(client), None)
            }
            other => return Err(RemoteError::Address(format!("{other}:// is not supported"))),
        };
        Ok(Self { origin: origin(url), store, parts, provider, answered: AtomicBool::new(false) })
    }

    /// Whether it says what lies below an address. Web servers do not.
    pub fn lists(&self) -> bool {
        self.provider != Provider::Http
    }

    /// What `attempt` returns, tried again after what may pass until the deadline is over.
    pub async fn persist<T, F>(&self, mut attempt: impl FnMut() -> F) -> Result<T, RemoteError>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let deadline = if self.answered.load(Ordering::Relaxed) { DEADLINE } else { FIRST_DEADLINE };
        let (mut attempts, mut message, mut pause) = (0, "timed out".to_owned(), PAUSES[0]);
        let trying = async {
            loop {
                attempts += 1;
                let error = match attempt().await {
                    Ok(value) => return Ok(value),
                    Err(error) => error,
                };
                if let Some(refusal) = self.refusal(&error) {
                    return Err(refusal);
                }
                message = words(&error);
                if attempts == TOLD_AFTER {
                    tracing::warn!(bucket = %self.origin, %message, "requests fail and are retried");
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSES[1]);
            }
        };
        let outcome = tokio::time::timeout(deadline, trying).await;
        match outcome {
            Ok(Ok(value)) => {
                self.answered.store(true, Ordering::Relaxed);
                Ok(value)
            }
            Ok(Err(refusal)) => Err(refusal),
            Err(_) if self.wants_credentials(&message) => Err(self.denied(message)),
            Err(_) => Err(RemoteError::Unreachable { seconds: deadline.as_secs(), attempts, message }),
        }
    }

    /// What is wrong, if trying again would not help.
    fn refusal(&self, error: &Error) -> Option<RemoteError> {
        let message = words(error);
        // A list's errors come as such, whatever they are.
        let status = status(&message);
        match error {
            _ if status == Some(404) && NO_BUCKET.iter().any(|code| message.contains(code)) => {
                Some(RemoteError::NoBucket(self.origin.clone()))
            }
            _ if matches!(status, Some(401 | 403)) => Some(self.denied(message)),
            Error::NotFound { .. } => Some(RemoteError::Missing),
            Error::Precondition { .. } => Some(RemoteError::Changed("its entity tag is another one".into())),
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Some(self.denied(message)),
            Error::NotSupported { .. } | Error::NotImplemented { .. } | Error::InvalidPath { .. } => {
                Some(RemoteError::Refused(message))
            }
            _ if message.contains("non-partial response") => {
                let what = "the server does not support range requests, which are needed";
                Some(RemoteError::Refused(format!("{what}; use a server that does")))
            }
            _ => match status {
                Some(408 | 429) | None => None,
                Some(status) if (400..500).contains(&status) => Some(RemoteError::Refused(message)),
                Some(_) => None,
            },
        }
    }

    fn denied(&self, message: String) -> RemoteError {
        let message = match self.wants_credentials(&message) {
            true => "there are no credentials".to_owned(),
            false => message,
        };
        RemoteError::Denied { message, remedy: self.provider.remedy() }
    }

    /// Whether what failed is the search for a machine's own credentials, which comes last of all.
    fn wants_credentials(&self, message: &str) -> bool {
        let metadata = ["169.254.169.254", "metadata.google.internal", "169.254.170.2"];
        self.provider != Provider::Http && metadata.iter().any(|host| message.contains(host))
    }
}

/// The HTTP status in an error's words, which is all that the crate shows of it.
fn status(message: &str) -> Option<u16> {
    let (_, after) = message.split_once("status code: ")?;
    after.get(..3)?.parse().ok()
}

/// An error and what caused it, in one line.
fn words(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !message.contains(&more) {
            message = format!("{message}: {more}");
        }
        cause = error.source();
    }
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    short(&message).unwrap_or(message)
}

/// What a server's answer says, without the request and the rest of the document around it: `status code: 403
/// Forbidden: AccessDenied: Access Denied`.
fn short(message: &str) -> Option<String> {
    let (_, answer) = message.split_once("non-2xx ")?;
    let (status, document) = answer.split_once(": <")?;
    let within = |tag: &str| {
        let (_, after) = document.split_once(&format!("{tag}>"))?;
        Some(after.split_once("</")?.0)
    };
    let parts = [Some(status), within("Code"), within("Message")];
    Some(parts.into_iter().flatten().collect::<Vec<_>>().join(": "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_is_told_without_the_document_around_it() {
        let message = "Generic S3 error: Error performing GET http://host/b in 5ms - Server returned non-2xx \
                       status code: 403 Forbidden: <?xml version=\"1.0\"?> \
                       <Error><Code>AccessDenied</Code><Message>No</Message></Error>";
        assert_eq!(short(message).unwrap(), "status code: 403 Forbidden: AccessDenied: No");
        assert_eq!(status(message), Some(403));
        assert_eq!(short("connection refused"), None);
    }
}
