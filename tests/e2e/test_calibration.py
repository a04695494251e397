"""A running service tells its prices, and a simulation at these takes roughly what the service does."""

from __future__ import annotations

import statistics

from cluster.config import config_from_settings
from cluster.loadtest.settings import Target
from cluster.loadtest.traces import TraceRecord
from cluster.simulator.calibration import unmeasured
from cluster.simulator.deployment import Deployment
from cluster.simulator.profile import Profile
from cluster.simulator.served_calibration import Questions, ServedCalibration
from cluster.simulator.simulation import Simulation
from cluster.simulator.step_price import LinkPrice
from cluster.simulator.workload import Arrival
from tests.e2e import profiles
from tests.e2e.fleet import Fleet

# as few questions as there may be
FEW = Questions(
    prompts=(32, 128, 256),
    heads=(256,),
    tails=(64, 128),
    batches=(1, 2),
    contexts=(32, 256),
    num_output=24,
    beside=(1, 2),
    read_beside=((128,), (64, 128)),
    runs=2,
    num_mixed=16,
)


def test_a_simulation_at_measured_prices_takes_what_the_service_takes(fleet: Fleet) -> None:
    system = fleet.system(profiles.STD)
    told: list[str] = []
    config = config_from_settings({"engine": {"model": str(fleet.models.bundled)}})
    target = Target(f"http://127.0.0.1:{system.port}")
    budget, chunk = config.prefill.token_budget, config.decode.prefill_chunk
    calibration = ServedCalibration(target, budget, chunk, told.append)
    found = calibration.measure(unmeasured(config.engine, LinkPrice(1e9)), FEW)
    assert found.pace is not None, told
    assert found.jitter.streaming, told
    fastest_s = found.price.batches[0].seconds(256.0)
    # alone a simulated request is as quick as the service was, but for what a mix of requests adds
    ttft_s, step_s = simulated(found, num_prompt=256, num_output=32)
    assert 0.6 * found.pace.read_s < ttft_s < 2.0 * found.pace.read_s + 0.1, told
    assert 0.6 * fastest_s < step_s < 2.0 * fastest_s, told


def simulated(profile: Profile, num_prompt: int, num_output: int) -> tuple[float, float]:
    """Of requests that come one after the other: seconds to the first token, and between two."""
    deployment = Deployment(
        profile.layout,
        profile.num_blocks,
        profile.price,
        profile.link,
        num_prefill=1,
        num_decode=1,
        max_context=profile.max_context,
        sharing=profile.sharing,
        front=profile.front,
        jitter=profile.jitter,
        is_length_known=True,
    )
    arrivals = [Arrival(at, 30.0 * at, TraceRecord(30.0 * at, num_prompt, num_output)) for at in range(20)]
    records = [record.result() for record in Simulation(deployment).play(arrivals).records]
    assert all(record.is_completed for record in records)
    ttft_s = statistics.median(record.event_times_s[0] - record.due_s for record in records)
    return ttft_s, statistics.median(pause for record in records for pause in record.pauses_s)
