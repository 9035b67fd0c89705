"""The server: starts the strategy."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedsub
from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    method = getattr(fedsub, config["method"])
    lr, epochs = config["learning-rate"], config["local-epochs"]
    strategy = method(model=Net, lr=lr, local_epochs=epochs, validation_fraction=0.1)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=config["num-server-rounds"],
    )
