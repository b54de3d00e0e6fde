//! [`Builder`]: the settings of a new communicator.

use super::comm::Comm;
use crate::contract::BackendKind;
use crate::rendezvous::environment;
use crate::rendezvous::environment::Environment;
use crate::rendezvous::unique_id::{UniqueId, take_listener};
use crate::start::{self, Settings};
use crate::types::error::{Error, Result, UsageError};
use crate::watch;
#[cfg(feature = "_nccl")]
use std::sync::Arc;
use std::time::Duration;

/// Settings for a new communicator. The environment gives those that are not set (see the table in the
/// crate's documentation), else they have their defaults.
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
    reproducible: Option<bool>,
    place: Option<(usize, usize, String)>,
    store: Option<StoreAddress>,
    #[cfg(feature = "_nccl")]
    nccl: crate::backend::nccl::Config,
}

/// The address of the store at which ranks meet, and the secret that they share.
#[derive(Clone)]
struct StoreAddress {
    address: String,
    token: String,
    /// Whether rank 0's process listens there already.
    is_listening: bool,
}

impl std::fmt::Debug for StoreAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreAddress").field("address", &self.address).finish_non_exhaustive()
    }
}

impl Builder {
    /// Sets the deadline of every wait, also of the ranks' rendezvous. Default: `PHALANX_TIMEOUT`
    /// (seconds), else [`DEFAULT_TIMEOUT`](crate::DEFAULT_TIMEOUT).
    pub fn timeout(mut self, timeout: Duration) -> Builder {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the backend that carries the data. Default: `PHALANX_BACKEND`, else NCCL or RCCL if each rank has a GPU, else the host, else
    /// solo for one rank.
    pub fn backend(mut self, backend: BackendKind) -> Builder {
        self.backend = Some(backend);
        self
    }

    /// Sets this rank's GPU, by its number in the process. Default: a GPU that the process sees and no other rank of its host has;
    /// preferably the one with the rank's number on the host.
    pub fn gpu(mut self, gpu: usize) -> Builder {
        self.gpu = Some(gpu);
        self
    }

    /// Sets whether the ranks compare every collective (operation, count, type, reduction, root) before it moves anything:
    /// a difference is then the same [`MismatchError`](crate::MismatchError) on all ranks. Default: `PHALANX_CHECK=1`.
    ///
    /// - **NCCL and MPI**: the ranks synchronize at the call of each operation. All ranks must call the collectives of several
    ///   communicators in one order, also in a group.
    /// - **NCCL with all ranks on one host**: the two ends of a message, and of a block of an `all_to_all_v`, compare its type and
    ///   count, too. A `send` then waits for the peer's `recv`. Messages that go together (of a group, or posted before a wait or
    ///   an [`is_done`](crate::Request::is_done)) wait for all their peers.
    /// - **NVSHMEM**: always compares.
    /// - **Host**: always compares. Ranks that exchange nothing in an operation (two that are both the root of a broadcast) notice
    ///   the difference in the next.
    pub fn check(mut self, check: bool) -> Builder {
        self.check = Some(check);
        self
    }

    /// Sets whether host memory of ranks on several hosts is combined in rank order, as it always is on one host: the result is then
    /// bit-identical to that of the same ranks on one host. Default: `PHALANX_REPRODUCIBLE=1`.
    ///
    /// Without it, sums, products, averages, minima and maxima of `f32` and `f64` combine the ranks of each host first, which takes less of
    /// the network; the result is still the same on all ranks and from run to run. Other types give one result either way.
    /// Libraries (MPI, NCCL, RCCL, NVSHMEM) combine in an order of their own. The ranks must agree on it.
    pub fn reproducible(mut self, reproducible: bool) -> Builder {
        self.reproducible = Some(reproducible);
        self
    }

    /// Sets this process's rank and the number of ranks, for a program with a launcher of its own.
    ///
    /// Other launchers' variables are then ignored. The ranks of one host find each other by `job`: a text that is the same for
    /// all of them and differs from every other job's, such as a random number from the launcher. Ranks on several hosts need
    /// a [`store`](Builder::store), too.
    ///
    /// If the ranks share no such text, one of them makes a [`unique_id`](Builder::unique_id).
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
    /// is not below `world_size`, there are more than 512 ranks (4096 at a store), or `job` is empty.
    pub fn place(mut self, rank: usize, world_size: usize, job: &str) -> Builder {
        self.place = Some((rank, world_size, job.to_owned()));
        self
    }

    /// Sets the store at which ranks of several hosts meet, beside [`place`](Builder::place).
    ///
    /// Rank 0 listens at `address` (`host:port`), the others connect to it. `token` is a secret of at least 16 characters, the
    /// same for all ranks (docs/security.md in the repository). The store also finds out which ranks share a host. As
    /// `PHALANX_STORE` and `PHALANX_TOKEN`.
    pub fn store(mut self, address: &str, token: &str) -> Builder {
        self.store =
            Some(StoreAddress { address: address.to_owned(), token: token.to_owned(), is_listening: false });
        self
    }

    /// Sets this process's rank, the number of ranks, and the [`UniqueId`] by which they find each other.
    ///
    /// Replaces [`place`](Builder::place) and [`store`](Builder::store). Whether the ranks may be on several hosts depends on how
    /// the id was made. The same as `ncclCommInitRank`, but for every backend, and the error names missing ranks.
    ///
    /// # Errors
    /// [`init`](Builder::init) answers the same errors as for [`place`](Builder::place); at rank 0 also
    /// [`UsageError::Setting`](crate::UsageError::Setting) for an id of [`UniqueId::listen`] that another process made, or that was used before.
    #[doc(alias("ncclCommInitRank", "ncclCommInitRankConfig"))]
    pub fn unique_id(mut self, id: &UniqueId, rank: usize, world_size: usize) -> Builder {
        self.place = Some((rank, world_size, id.job()));
        self.store = id.store().map(|(address, token)| StoreAddress {
            address: address.to_owned(),
            token,
            is_listening: true,
        });
        self
    }

    /// Sets the options of NCCL's and RCCL's communicators.
    #[cfg(feature = "_nccl")]
    pub fn nccl(mut self, config: crate::backend::nccl::Config) -> Builder {
        self.nccl = config;
        self
    }

    /// Makes the communicator of this process: [`phalanx::init`](crate::init) with these settings.
    pub fn init(self) -> Result<Comm> {
        let settings = self.settings()?;
        watch::begin()?;
        start::init(settings).map(Comm::from)
    }

    /// Joins a running job: [`phalanx::join`](crate::join) with these settings.
    pub fn join(self) -> Result<Comm> {
        let settings = self.settings()?;
        watch::begin()?;
        start::join(&settings).map(Comm::from)
    }

    /// Runs ranks as threads: [`phalanx::run`](crate::run) with these settings.
    pub fn run<R: Send>(self, ranks: usize, f: impl Fn(Comm) -> R + Sync) -> Result<Vec<R>> {
        let settings = self.settings()?;
        watch::begin()?;
        start::run_threads(ranks, &settings, |new| f(Comm::from(new)))
    }

    fn settings(self) -> Result<Settings> {
        // Taken first, so that every error closes it.
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
        let reproducible = match self.reproducible {
            Some(reproducible) => reproducible,
            None => environment::reproducible_from_environment().map_err(Error::from)?,
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
            reproducible,
            listener,
            #[cfg(feature = "_nccl")]
            nccl: Arc::new(crate::backend::nccl::NcclSettings::from_environment(self.nccl, check)?),
        })
    }
}
