//! [`Builder`]: the settings of a new communicator.

use super::comm::Comm;
use crate::contract::BackendKind;
use crate::rendezvous::environment;
use crate::rendezvous::environment::Environment;
use crate::rendezvous::unique_id::{UniqueId, take_listener};
use crate::start::{self, Settings};
use crate::types::error::{Error, Result, UsageError};
use crate::watch;
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::Duration;

/// Settings for a new communicator; what is not set comes from the environment (see the table in the
/// crate's documentation) or is the default.
///
/// ```
/// # fn main() -> phalanx::Result<()> {
/// use std::time::Duration;
/// let sizes = phalanx::Comm::builder()
///     .timeout(Duration::from_secs(10))
///     .run(2, |comm| comm.world_size())?;
/// assert_eq!(sizes, [2, 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Builder {
    timeout: Option<Duration>,
    backend: Option<BackendKind>,
    gpu: Option<usize>,
    check: Option<bool>,
    place: Option<(usize, usize, String)>,
    store: Option<StoreAddress>,
    #[cfg(feature = "cuda")]
    nccl: crate::backend::nccl::Config,
}

/// Where ranks meet, and by what they know each other.
#[derive(Clone)]
struct StoreAddress {
    address: String,
    token: String,
    /// Whether the process of rank 0 listens there already.
    is_listening: bool,
}

impl std::fmt::Debug for StoreAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreAddress").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Builder {
    /// How long any wait may take; also for the ranks to find each other. Default: `PHALANX_TIMEOUT`
    /// (seconds), else [`DEFAULT_TIMEOUT`].
    pub fn timeout(mut self, timeout: Duration) -> Builder {
        self.timeout = Some(timeout);
        self
    }

    /// What carries the data. Default: `PHALANX_BACKEND`, else NCCL or RCCL if each rank has a GPU, else the host, else
    /// solo for one rank.
    pub fn backend(mut self, backend: BackendKind) -> Builder {
        self.backend = Some(backend);
        self
    }

    /// Which GPU this rank uses, as the process numbers those it sees. Default: one that no other rank of its host has, of those that its
    /// process sees; the one with the rank's number there, if it can be had.
    pub fn gpu(mut self, gpu: usize) -> Builder {
        self.gpu = Some(gpu);
        self
    }

    /// Whether the ranks compare every collective (operation, count, type, reduction, root) before it moves anything:
    /// a difference is then the same [`MismatchError`](crate::MismatchError) on all ranks. Default: `PHALANX_CHECK=1`.
    ///
    /// On NCCL and MPI it costs a meeting of the ranks for each operation, at its call: all ranks call the collectives of several
    /// communicators in one order, in a group, too. On NCCL the two ends of a message, and of a block of an
    /// `all_to_all_v`, compare its type and count, too, if all ranks are on one host: a `send` then waits until the peer has come to
    /// its `recv`, and messages that go together (of a group, or posted before a wait or an
    /// [`is_done`](crate::Request::is_done)) wait until all their peers have. NVSHMEM's backend always compares. The host's does,
    /// with this setting or without, but ranks that exchange nothing in an operation (two that are both the root of a broadcast)
    /// notice the difference in the next.
    pub fn check(mut self, check: bool) -> Builder {
        self.check = Some(check);
        self
    }

    /// Which rank this process is, of how many, for a program with a launcher of its own: what other launchers' variables say is
    /// then not looked at. The ranks of one host find each other by `job`: any text that they have in common with each other and
    /// with no other job, such as a random number that the launcher gives them. Ranks that may be on several hosts need a
    /// [`store`](Builder::store), too.
    ///
    /// Where the ranks have nothing in common yet, one of them makes a [`unique_id`](Builder::unique_id).
    ///
    /// ```
    /// # fn main() -> phalanx::Result<()> {
    /// let comm = phalanx::Comm::builder().place(0, 1, "a job of one").init()?;
    /// assert_eq!((comm.rank(), comm.world_size()), (0, 1));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`init`](Builder::init) and [`join`](Builder::join) answer [`UsageError::Setting`](crate::UsageError::Setting) if `rank`
    /// is not below `world_size`, there are more than 512 ranks, or `job` is empty.
    pub fn place(mut self, rank: usize, world_size: usize, job: &str) -> Builder {
        self.place = Some((rank, world_size, job.to_owned()));
        self
    }

    /// Where the ranks of several hosts meet, if the program gives them a [`place`](Builder::place): rank 0 listens at `address`
    /// (`host:port`), the others connect to it. `token` is a secret of at least 16 characters, the same for all ranks
    /// (docs/security.md in the repository). Which ranks share a host is found out there. As `PHALANX_STORE` and
    /// `PHALANX_TOKEN`.
    pub fn store(mut self, address: &str, token: &str) -> Builder {
        self.store =
            Some(StoreAddress { address: address.to_owned(), token: token.to_owned(), is_listening: false });
        self
    }

    /// Which rank this process is, of how many, and whom it meets: those with the same [`UniqueId`], on one host or on several, as the
    /// id was made. Takes the place of [`place`](Builder::place) and [`store`](Builder::store). It is what `ncclCommInitRank` does;
    /// here it works for every backend, and ranks that do not come are named.
    ///
    /// # Errors
    /// [`init`](Builder::init) answers what it does for [`place`](Builder::place); at rank 0 also
    /// [`UsageError::Setting`](crate::UsageError::Setting) for an id of [`UniqueId::listen`] that another process made, or that was used before.
    pub fn unique_id(mut self, id: &UniqueId, rank: usize, world_size: usize) -> Builder {
        self.place = Some((rank, world_size, id.job()));
        self.store = id.store().map(|(address, token)| StoreAddress {
            address: address.to_owned(),
            token,
            is_listening: true,
        });
        self
    }

    /// Settings of NCCL's and RCCL's communicators.
    #[cfg(feature = "cuda")]
    pub fn nccl(mut self, config: crate::backend::nccl::Config) -> Builder {
        self.nccl = config;
        self
    }

    /// As [`phalanx::init`](crate::init), with these settings.
    pub fn init(self) -> Result<Comm> {
        let settings = self.settings()?;
        watch::begin()?;
        start::init(settings).map(Comm::from)
    }

    /// As [`phalanx::join`](crate::join), with these settings.
    pub fn join(self) -> Result<Comm> {
        let settings = self.settings()?;
        watch::begin()?;
        start::join_grown(settings).map(Comm::from)
    }

    /// As [`phalanx::run`](crate::run), with these settings.
    pub fn run<R: Send>(self, ranks: usize, f: impl Fn(Comm) -> R + Sync) -> Result<Vec<R>> {
        let settings = self.settings()?;
        watch::begin()?;
        start::run_threads(ranks, &settings, |new| f(Comm::from(new)))
    }

    fn settings(self) -> Result<Settings> {
        // First of all, so that it is closed by any error.
        let listener = match (&self.store, &self.place) {
            (Some(StoreAddress { address, is_listening: true, .. }), Some((0, ..))) => {
                Some(take_listener(address)?)
            }
            _ => None,
        };
        let check = match self.check {
            Some(check) => check,
            None => environment::check_from_environment().map_err(Error::from)?,
        };
        let mut environment = Environment::current();
        if let Some((rank, world_size, job)) = &self.place {
            environment = environment.placed(*rank, *world_size, job);
        }
        if let Some(StoreAddress { address, token, is_listening }) = &self.store {
            if self.place.is_none() {
                let expected = "Builder::place beside it: which rank this is, of how many".to_owned();
                let (name, value) = ("Builder::store".to_owned(), address.clone());
                return Err(UsageError::Setting { name, value, expected }.into());
            }
            environment = if *is_listening {
                environment.with_id(address, token)
            } else {
                environment.with_store(address, token)
            };
        }
        Ok(Settings {
            environment,
            timeout: match self.timeout {
                Some(timeout) => timeout,
                None => environment::timeout_from_environment().map_err(Error::from)?,
            },
            backend: self.backend,
            gpu: self.gpu,
            check,
            listener,
            #[cfg(feature = "cuda")]
            nccl: Arc::new(crate::backend::nccl::NcclSettings { config: self.nccl, check, driver: None }),
        })
    }
}
