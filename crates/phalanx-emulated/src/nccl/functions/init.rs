//! How communicators begin.

use crate::base::call::{Answer, Code, answered, check_fork};
use crate::base::handles::Handle;
use crate::base::pointers::{In, Out};
use crate::base::settings::settings;
use crate::base::violation::violation;
use crate::cuda::{capture, context, device};
use crate::nccl::communicator::{Communicator, end};
use crate::nccl::config::Config;
use crate::nccl::group::{self, nccl, record};
use crate::nccl::job::Job;
use crate::nccl::result::*;
use crate::nccl::transport::join::{UniqueId, join};
use crate::nccl::transport::mailbox::Stopped;
use std::ffi::c_int;
use std::sync::Arc;

/// A valid rank and number of ranks.
fn ranks(function: &str, rank: c_int, ranks: c_int) -> Result<(u32, u32), Code> {
    if ranks < 1 || rank < 0 || rank >= ranks {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : invalid rank requested : {rank}/{ranks}")));
    }
    Ok((rank as u32, ranks as u32))
}

/// The device of a new communicator: the current one. The driver is initialised, and a capture on the device
/// is a violation.
pub fn device_for_init(function: &str) -> Result<usize, Code> {
    check_fork(function);
    device::initialize().map_err(|code| fail(UNHANDLED_CUDA_ERROR, format!("Cuda failure {code}")))?;
    let device = context::runtime_device();
    context::runtime_ensure(device);
    if capture::any_in(context::runtime_context(device).handle) {
        violation(function, "a communicator is created while a stream of its device is captured");
    }
    Ok(device)
}

fn init(
    function: &'static str,
    to: Out<Handle>,
    (rank, of): (c_int, c_int),
    ids: &[UniqueId],
    config: Config,
) -> Answer {
    if to.is_null() {
        return Err(fail(INVALID_ARGUMENT, format!("{function} : newcomm argument is NULL")));
    }
    let place = ranks(function, rank, of)?;
    if settings().ranks_of_an_id.is_some_and(|most| of as usize > most * ids.len()) {
        return Err(fail(
            SYSTEM_ERROR,
            format!("{function} : too many ranks for the roots of {} ids", ids.len()),
        ));
    }
    // All ranks join at the first id. In NCCL the others spread the load.
    let id = ids[0];
    let (number, _) = id.parts()?;
    let device = device_for_init(function)?;
    let communicator = Communicator::new(function, number, place, device, config);
    // The caller has the handle at once, for `ncclCommGetAsyncError` and `ncclCommAbort`.
    to.set(communicator.handle);
    begin(function, communicator, to, move |communicator| {
        connect(function, communicator, &id, || communicator.is_stopped())
    })
}

/// Begins a communicator with a job that connects it to the other ranks.
pub fn begin(
    function: &'static str,
    communicator: Arc<Communicator>,
    to: Out<Handle>,
    connect: impl FnOnce(&Communicator) -> Result<Code, Stopped> + Send + 'static,
) -> Answer {
    communicator.state().result = IN_PROGRESS;
    let worker = Arc::clone(&communicator);
    let body = move || {
        if settings().init_hangs {
            worker.mailbox.wait_for_ever(|| worker.is_stopped());
        }
        let code = connect(&worker).unwrap_or(INTERNAL_ERROR);
        if worker.config.blocking {
            if code == SUCCESS {
                worker.state().result = SUCCESS;
            } else {
                end(function, &worker);
                worker.close();
                to.set(0);
            }
        }
        code
    };
    group::run(Job { function, communicator, body: Box::new(body) })
}

/// Joins the ranks of an id, and connects the communicator to them. `stop` ends the wait for them.
pub fn connect(
    function: &str,
    communicator: &Communicator,
    id: &UniqueId,
    stop: impl Fn() -> bool,
) -> Result<Code, Stopped> {
    let place = (communicator.rank, communicator.ranks);
    let device = device::physical(communicator.device);
    Ok(match join(function, id, place, device, &communicator.mailbox, stop)? {
        Ok(peers) => {
            communicator.connect(peers);
            SUCCESS
        }
        Err(code) => code,
    })
}

nccl! {
    fn ncclGetUniqueId(id: Out<UniqueId>) {
        check_fork(FUNCTION);
        if id.is_null() {
            return Err(fail(INVALID_ARGUMENT, "GetUniqueId : out argument is NULL"));
        }
        id.set(UniqueId::new());
        Ok(())
    }

    fn ncclCommInitRank(comm: Out<Handle>, count: c_int, id: UniqueId, rank: c_int) {
        record(init(FUNCTION, comm, (rank, count), &[id], Config::default()))
    }

    fn ncclCommInitRankConfig(comm: Out<Handle>, count: c_int, id: UniqueId, rank: c_int, config: In<u8>) {
        let config = record(Config::read(FUNCTION, config, &Config::default()))?;
        record(init(FUNCTION, comm, (rank, count), &[id], config))
    }

    fn ncclCommInitRankScalable(
        comm: Out<Handle>, count: c_int, rank: c_int, number: c_int, ids: In<UniqueId>, config: In<u8>,
    ) {
        let config = record(Config::read(FUNCTION, config, &Config::default()))?;
        if number < 1 || number > count || ids.is_null() {
            return record(Err(fail(INVALID_ARGUMENT, format!("{FUNCTION} : invalid number of ids {number}"))));
        }
        let ids = ids.slice(number as usize);
        for (number, id) in ids.iter().enumerate() {
            let own = record(id.parts())?;
            if ids[..number].iter().any(|other| other.parts().is_ok_and(|other| other == own)) {
                violation(FUNCTION, "the same unique id was passed twice");
            }
        }
        record(init(FUNCTION, comm, (rank, count), ids, config))
    }

    fn ncclCommInitAll(comms: Out<Handle>, count: c_int, devices: In<c_int>) {
        device::initialize().map_err(|code| fail(UNHANDLED_CUDA_ERROR, format!("Cuda failure {code}")))?;
        if comms.is_null() || count < 1 || count as usize > settings().devices.len() {
            return Err(fail(INVALID_ARGUMENT, format!("CommInitAll : invalid device count requested : {count}")));
        }
        init_all(FUNCTION, comms, count, devices)
    }
}

fn init_all(function: &'static str, comms: Out<Handle>, count: c_int, devices: In<c_int>) -> Answer {
    let chosen: Vec<usize> = if devices.is_null() {
        (0..count as usize).collect()
    } else {
        let known = |device: &c_int| {
            device::index(*device).map_err(|_| fail(UNHANDLED_CUDA_ERROR, "invalid device ordinal"))
        };
        devices.slice(count as usize).iter().map(known).collect::<Result<_, Code>>()?
    };
    let repeated = (1..chosen.len()).find(|n| chosen[..*n].contains(&chosen[*n]));
    if let Some(n) = repeated {
        return Err(fail(INVALID_USAGE, format!("Duplicate GPU detected: device {}", chosen[n])));
    }
    let id = UniqueId::new();
    group::ncclGroupStart();
    for (rank, device) in chosen.into_iter().enumerate() {
        let begin = || init(function, comms.nth(rank), (rank as c_int, count), &[id], Config::default());
        // An error fails the group.
        let _ = record(context::runtime_on_device(device, begin));
    }
    answered(group::ncclGroupEnd())
}
